"""Samples to micro-batches: what begins alike as one tree, the rest as rows of like length; each distinct picture once.

The trainer calls :func:`split` once per mini-batch and :func:`collate` for each part. A token has the rotary position that its own
row gives it, whatever is packed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlmrl.media import merge_mm_inputs
from vlmrl.model.families import merged_grid, rope_positions
from vlmrl.model.policy import TokenScores
from vlmrl.train import prefix_tree
from vlmrl.train.prefix_tree import Tree
from vlmrl.types import Batch, MediaItem, Sample

MASKED = 2.0  # what attention under a tree's mask costs for each pair of tokens, over that of a causal row
ALIKE = 0.9  # trees are padded together only where the shortest is so long, over the longest


@dataclass(frozen=True)
class Part:
    """One micro-batch: ``rows`` of the samples it was split from, as ``trees`` or, where there are none, one by one."""

    rows: list[int]
    trees: list[Tree]


@dataclass(frozen=True)
class Packed:
    """A batch, and where its samples' tokens lie in it: ``places`` ``[samples, length]`` into the flattened batch, -1 for padding.

    ``None``: each sample is a row of the batch.
    """

    batch: Batch
    places: torch.Tensor | None = None

    def to(self, device: torch.device) -> Packed:
        return Packed(self.batch.to(device), None if self.places is None else self.places.to(device))

    def by_sample(self, scores: TokenScores) -> TokenScores:
        """Scores of the batch as ``[samples, length]``."""
        places = self.places
        if places is None:
            return scores
        taken = [values.flatten()[places.clamp(min=0)] * (places >= 0) for values in (scores.logprobs, scores.entropy)]
        return TokenScores(*taken)


@dataclass(frozen=True)
class Sharing:
    """What is needed to share prefixes. ``balance``: the length at which a row's attention costs as much as all else."""

    image_token_id: int | None
    merge_size: int
    balance: float

    def cost(self, tokens: int, pairs: float) -> float:
        """In units of one token's work outside attention; ``pairs`` of tokens that look at each other, causal rows' halved."""
        return tokens + pairs / self.balance


def split(samples: Sequence[Sample], tokens_per_micro_batch: int, sharing: Sharing | None = None) -> list[Part]:
    """Micro-batches of at most so many padded tokens, the longest first; what is longer by itself gets one of its own.

    With ``sharing`` the rows of a group become trees where that is the cheaper way. Rows of lengths 5, 2, 4 and a budget of 10
    give rows [0, 2] and [1].
    """
    alone = list(range(len(samples)))
    parts: list[Part] = []
    if sharing is not None:
        trees, alone = _trees(samples, tokens_per_micro_batch, sharing)
        for chosen in _bins([len(tree) for tree in trees], tokens_per_micro_batch, ALIKE):
            together = [trees[index] for index in chosen]
            parts.append(Part([row for tree in together for row in tree.rows], together))
    for chosen in _bins([len(samples[row]) for row in alone], tokens_per_micro_batch):
        parts.append(Part([alone[index] for index in chosen], []))
    return parts


def _trees(samples: Sequence[Sample], budget: int, sharing: Sharing) -> tuple[list[Tree], list[int]]:
    """The trees that are worth it, and the rows that stay alone."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    atoms = prefix_tree.atoms_of(samples, sharing.image_token_id)
    trees: list[Tree] = []
    alone: list[int] = []
    for group in groups.values():
        for rows, is_tree in _cheapest(atoms, prefix_tree.in_order(atoms, group), budget, sharing):
            if is_tree:
                trees.append(prefix_tree.build(samples, atoms, rows, sharing.image_token_id, sharing.merge_size))
            else:
                alone += rows
    return trees, sorted(alone)


def _cheapest(
    atoms: Sequence[np.ndarray], ordered: list[int], budget: int, sharing: Sharing
) -> list[tuple[list[int], bool]]:
    """A group cut into parts, each a tree or not: smaller trees share less and have fewer pairs of tokens to mask."""

    def priced(size: int) -> tuple[float, list[tuple[list[int], bool]]]:
        total, chosen = 0.0, []
        for rows, unique in prefix_tree.cut(atoms, ordered, size):
            as_tree = sharing.cost(unique, MASKED * unique**2 / 2)
            as_rows = sum(sharing.cost(len(atoms[row]), len(atoms[row]) ** 2 / 2) for row in rows)
            total += min(as_tree, as_rows)
            chosen.append((rows, as_tree < as_rows))
        return total, chosen

    sizes = [budget]
    while sizes[-1] > max(len(atoms[row]) for row in ordered):
        sizes.append(sizes[-1] * 2 // 3)
    return min((priced(size) for size in sizes), key=lambda pair: pair[0])[1]


def _bins(lengths: Sequence[int], budget: int, alike: float = 0.0) -> list[list[int]]:
    """Indices that are padded together, longest first, none shorter than ``alike`` times the longest."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[bins[-1][0]] if bins else 0
        if not bins or (len(bins[-1]) + 1) * longest > budget or lengths[index] < alike * longest:
            bins.append([])
        bins[-1].append(index)
    return bins


def pack(samples: Sequence[Sample], part: Part, image_token_id: int | None, merge_size: int) -> Packed:
    """The batch of one part. ``samples`` are those the part was split from."""
    rows = [samples[row] for row in part.rows]
    if not part.trees:
        return Packed(collate(rows, image_token_id, merge_size))
    length = max(map(len, part.trees))
    shape = (len(part.trees), length)
    token_ids, parents = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    ends = torch.arange(1, length + 1).repeat(len(part.trees), 1)  # padding sees itself
    position_ids = torch.zeros(3, *shape, dtype=torch.long)
    places = torch.full((len(rows), max(map(len, rows))), -1, dtype=torch.long)
    number = 0
    for index, tree in enumerate(part.trees):
        size = len(tree)
        token_ids[index, :size] = torch.from_numpy(tree.token_ids)
        parents[index, :size] = torch.from_numpy(tree.parents)
        ends[index, :size] = torch.from_numpy(tree.ends)
        position_ids[:, index, :size] = tree.position_ids
        for path in tree.paths:
            sample = rows[number]
            trained = np.flatnonzero(sample.loss_mask) + len(sample.prompt_token_ids)
            places[number, trained] = torch.from_numpy(path[trained]) + index * length
            number += 1
    targets = torch.zeros(len(part.trees) * length, dtype=torch.bool)
    targets[places[places >= 0]] = True
    media = [item for tree in part.trees for item in tree.media]
    merged, order = _distinct(media)
    batch = Batch(token_ids, position_ids, targets.view(shape), merged, order, ends, parents)
    return Packed(batch, places)


def collate(samples: Sequence[Sample], image_token_id: int | None, merge_size: int) -> Batch:
    """One row a sample, padded on the right, with M-RoPE positions of their own, and the distinct pictures' tensors merged once."""
    length = max(map(len, samples))
    token_ids = torch.zeros(len(samples), length, dtype=torch.long)
    position_ids = torch.zeros(3, len(samples), length, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids = sample.token_ids
        grids = [merged_grid(item.mm_inputs["image_grid_thw"], merge_size) for item in sample.media]
        token_ids[row, : len(ids)] = torch.tensor(ids)
        position_ids[:, row, : len(ids)], _ = rope_positions(ids, grids, image_token_id)
    merged, order = _distinct([item for sample in samples for item in sample.media])
    targets = per_token(samples, lambda sample: sample.loss_mask).bool()
    return Batch(token_ids, position_ids, targets, merged, order)


def _distinct(media: Sequence[MediaItem]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Each distinct picture's tensors once, merged, and for each occurrence which of them it is."""
    distinct = {item.id: item for item in media}
    index_of = {name: index for index, name in enumerate(distinct)}
    return merge_mm_inputs(list(distinct.values())), [index_of[item.id] for item in media]


def per_token(samples: Sequence[Sample], values: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
    """A list beside each row's response as a float tensor ``[rows, length]`` beside its tokens, zero on prompt and padding."""
    tensor = torch.zeros(len(samples), max(map(len, samples)))
    for row, sample in enumerate(samples):
        start = len(sample.prompt_token_ids)
        tensor[row, start : len(sample)] = torch.tensor(values(sample), dtype=torch.float32)
    return tensor
