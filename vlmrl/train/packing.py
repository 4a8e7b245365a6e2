"""Samples to micro-batches, in one of three layouts, with each distinct image once.

The trainer calls :func:`split` once per mini-batch and :func:`pack` for each micro-batch. A token's rotary position depends on its own
row only, whatever is packed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

import numpy as np
import torch

from vlmrl.families.base import Family
from vlmrl.model.expert_routing import indices_from_routing
from vlmrl.model.policy import Policy, TokenScores
from vlmrl.train import prefix_tree
from vlmrl.train.bins import Piece, fill_bins
from vlmrl.train.prefix_tree import PrefixOrder
from vlmrl.types import MediaItem, MicroBatch, Sample, to_device

Layout = Literal["tree", "packed", "padded"]
"""``tree``: each shared prefix once. ``packed``: rows end to end. ``padded``: one row per sample, padded."""


def layout_of(policy: Policy, share_prefixes: bool) -> Layout:
    """The layout of micro-batches that the model's family allows. On a CPU, padded rows are cheaper than packed ones."""
    if share_prefixes and policy.family.may_share:
        return "tree"
    return "packed" if policy.family.may_share and policy.device.type != "cpu" else "padded"


@dataclass(frozen=True)
class MicroBatchPlan:
    """One micro-batch: the indices of its samples in the mini-batch, and their layout."""

    rows: list[int]
    layout: Layout
    shared: Sequence[int] = ()
    """Trees only: the length of the prefix that each row shares with the row before it."""


@dataclass(frozen=True)
class Packed:
    """A batch, and the positions of its samples' trained tokens in it."""

    batch: MicroBatch
    indices: torch.Tensor
    """``[samples, longest response]`` into the flattened batch, -1 where a token is not trained and for padding."""

    def to(self, device: torch.device) -> Packed:
        return Packed(self.batch.to(device), to_device(self.indices, device))

    def by_sample(self, scores: TokenScores) -> TokenScores:
        """Scores of the batch as ``[samples, longest response]``: a prompt, which may be long, has none."""
        indices, trained = self.indices, self.indices >= 0
        each = (scores.logprobs, scores.entropy)
        result = TokenScores(*(values.flatten()[indices.clamp(min=0)] * trained for values in each))
        if scores.divergence is None or scores.agreement is None:
            return result
        zeros = torch.zeros_like(indices, dtype=torch.float32)
        spread = (zeros.masked_scatter(trained, values) for values in (scores.divergence, scores.agreement))
        return result._replace(**dict(zip(("divergence", "agreement"), spread, strict=True)))


def mini_batches(samples: Sequence[Sample], groups_per_step: int | None) -> list[list[int]]:
    """The sample indices of each optimizer step: ``groups_per_step`` groups, however many rows they have; ``None``: all groups.

    If that does not divide the number of groups, they are split evenly into as many steps as come nearest to it: 9 groups, 4 a
    step, are 4 and 5, since a last group alone would move the weights as far as 4 others do.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    members = list(groups.values())
    size = groups_per_step or len(members)
    count = max(1, (len(members) + (size - 1) // 2) // size)
    edges = [number * len(members) // count for number in range(count + 1)]
    return [list(chain.from_iterable(members[first:last])) for first, last in pairwise(edges)]


def split(
    samples: Sequence[Sample],
    tokens_per_micro_batch: int,
    layout: Layout = "padded",
    image_token_id: int | None = None,
    ranks: int = 1,
) -> list[MicroBatchPlan]:
    """Micro-batches of at most ``tokens_per_micro_batch`` computed tokens, the largest first. A longer row has one of its own.

    Rows of lengths 5, 2, 4 and a budget of 10 give rows [0, 2] and [1], padded or packed. In a tree, a group that does not fit into
    one micro-batch is cut where the fewest tokens are computed twice. For several ``ranks`` the number of micro-batches is raised to a
    multiple of ``ranks``, if there are enough rows, and they have even sizes.
    """
    order = PrefixOrder(prefix_tree.atoms_of(samples, image_token_id)) if layout == "tree" else None
    cut = _cutter(samples, layout, order)
    rows = list(range(len(samples)))
    pieces = cut(rows, tokens_per_micro_batch)
    if ranks > 1:
        pieces = _balanced(cut, rows, tokens_per_micro_batch, -(-len(pieces) // ranks) * ranks)
    return [MicroBatchPlan(piece.rows, layout, order.shared_lengths(piece.rows) if order else ()) for piece in pieces]


Cut = Callable[[Sequence[int], int], list[Piece]]
"""Cuts rows into micro-batches of a budget, the largest first."""


def _cutter(samples: Sequence[Sample], layout: Layout, order: PrefixOrder | None) -> Cut:
    if layout == "padded":
        return lambda rows, budget: _padded([(row, len(samples[row])) for row in rows], budget)
    if order is None:
        return lambda rows, budget: fill_bins([Piece([row], len(samples[row])) for row in rows], budget)

    def cut(rows: Sequence[int], budget: int) -> list[Piece]:
        groups: dict[str, list[int]] = {}
        for row in rows:
            groups.setdefault(samples[row].group_id, []).append(row)
        pieces = [
            Piece(part, tokens) for group in groups.values() for part, tokens in prefix_tree.cut(order, group, budget)
        ]
        return [replace(piece, rows=order.sort(piece.rows)) for piece in fill_bins(pieces, budget, order)]

    return cut


def _balanced(cut: Cut, rows: Sequence[int], budget: int, count: int) -> list[Piece]:
    """``count`` micro-batches of even sizes, or fewer if there are too few rows. The largest first.

    Four micro-batches of 10 tokens on 3 ranks take as long as 20 tokens, since two ranks wait; six of 7 take as long as 14.
    """
    pieces = _smallest(cut, rows, budget, count)
    while len(pieces) < count:
        several = [piece for piece in pieces if len(piece.rows) > 1]
        if not several:
            break
        largest = max(several, key=lambda piece: piece.tokens)
        pieces = [piece for piece in pieces if piece is not largest]
        pieces += _smallest(cut, largest.rows, largest.tokens - 1, 2)
    return sorted(pieces, key=lambda piece: -piece.tokens)


def _smallest(cut: Cut, rows: Sequence[int], budget: int, count: int) -> list[Piece]:
    """The cut by the smallest budget that gives at most ``count`` micro-batches; by ``budget`` if that gives more."""
    pieces = cut(rows, budget)
    low, high = sum(piece.tokens for piece in pieces) // count - 1, min(budget, pieces[0].tokens)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        smaller = cut(rows, middle)
        if len(smaller) <= count:
            high, pieces = middle, smaller
        else:
            low = middle
    return pieces


def _padded(rows: Sequence[tuple[int, int]], budget: int) -> list[Piece]:
    """Padded micro-batches of rows and their lengths, longest rows first."""
    bins: list[Piece] = []
    longest = 0
    for row, length in sorted(rows, key=lambda each: -each[1]):
        if not bins or bins[-1].tokens + longest > budget:
            bins.append(Piece([], 0))
            longest = length
        bins[-1].rows.append(row)
        bins[-1].tokens += longest
    return bins


def pack(samples: Sequence[Sample], plan: MicroBatchPlan, family: Family) -> Packed:
    """The batch of one micro-batch. ``samples`` are the whole mini-batch; scores by sample are in the order of ``plan.rows``."""
    rows = [samples[row] for row in plan.rows]
    if plan.layout == "padded":
        return Packed(collate(rows, family), _trained_indices(rows, _padded_paths(rows)))
    tree = prefix_tree.build_tree(rows, plan.shared or [0] * len(rows), family)
    indices = _trained_indices(rows, tree.paths)
    targets = _marked(indices, (1, len(tree)))
    ends, parents = (torch.from_numpy(values)[None] for values in (tree.ends, tree.parents))
    images, order = _distinct(tree.media)
    experts = expert_indices(rows, tree.paths, (1, len(tree)))
    token_ids, position_ids = torch.from_numpy(tree.token_ids)[None], tree.position_ids[:, None]
    batch = MicroBatch(token_ids, position_ids, targets, images, order, ends, parents, experts)
    return Packed(batch, indices)


def collate(samples: Sequence[Sample], family: Family) -> MicroBatch:
    """One row per sample, padded on the right, each with its own M-RoPE positions; each distinct image once."""
    length = max(map(len, samples))
    token_ids = torch.zeros(len(samples), length, dtype=torch.long)
    position_ids = torch.zeros(3, len(samples), length, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids = sample.token_ids
        token_ids[row, : len(ids)] = torch.tensor(ids)
        position_ids[:, row, : len(ids)], _ = family.positions(ids, sample.media)
    images, order = _distinct([item for sample in samples for item in sample.media])
    paths = _padded_paths(samples)
    targets = _marked(_trained_indices(samples, paths), (len(samples), length))
    experts = expert_indices(samples, paths, (len(samples), length))
    return MicroBatch(token_ids, position_ids, targets, images, order, experts=experts)


def _padded_paths(samples: Sequence[Sample]) -> list[np.ndarray]:
    """The indices of each sample's tokens in the flattened batch of padded rows."""
    length = max(map(len, samples))
    return [np.arange(len(sample)) + row * length for row, sample in enumerate(samples)]


def _trained_indices(samples: Sequence[Sample], paths: Sequence[np.ndarray]) -> torch.Tensor:
    """:attr:`Packed.indices` of samples whose tokens are at ``paths``."""
    indices = torch.full((len(samples), max(len(sample.response_ids) for sample in samples)), -1, dtype=torch.long)
    for number, (sample, path) in enumerate(zip(samples, paths, strict=True)):
        trained = np.flatnonzero(sample.loss_mask)
        indices[number, trained] = torch.from_numpy(path[len(sample.prompt_token_ids) + trained])
    return indices


def _marked(indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A mask of ``shape`` that is True at the indices of 0 and more."""
    marked = torch.zeros(shape, dtype=torch.bool)
    marked.view(-1)[indices[indices >= 0]] = True
    return marked


def _distinct(media: Sequence[MediaItem]) -> tuple[list[MediaItem], list[int]]:
    """The distinct images, and for each occurrence the index of its image."""
    distinct = {item.id: item for item in media}
    index_of = {name: index for index, name in enumerate(distinct)}
    return list(distinct.values()), [index_of[item.id] for item in media]


def per_token(samples: Sequence[Sample], values: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
    """One value per response token as a float tensor ``[rows, longest response]``, zero on padding."""
    tensor = torch.zeros(len(samples), max(len(sample.response_ids) for sample in samples))
    for row, sample in enumerate(samples):
        tensor[row, : len(sample.response_ids)] = torch.tensor(values(sample), dtype=torch.float32)
    return tensor


def unpadded(samples: Sequence[Sample], rows: torch.Tensor) -> list[np.ndarray]:
    """For each sample its row ``[response]`` of a tensor ``[rows, longest response]``."""
    return [row[: len(sample.response_ids)] for sample, row in zip(samples, rows.cpu().numpy(), strict=True)]


def expert_indices(
    samples: Sequence[Sample], paths: Sequence[np.ndarray], shape: tuple[int, int]
) -> torch.Tensor | None:
    """The recorded experts ``[rows, length, layers, top_k]`` of a batch of ``shape`` (rows, length); ``None`` if there are none.

    ``paths[i]`` are the indices of sample i's tokens in the flattened batch. A token of several samples gets the experts of the first
    sample that has them recorded, and -1 if none has.
    """
    experts: torch.Tensor | None = None
    for sample, path in zip(samples, paths, strict=True):
        if not any(sample.expert_routing):
            continue
        own = torch.from_numpy(indices_from_routing(sample.expert_routing))
        if experts is None:
            experts = torch.full((shape[0] * shape[1], *own.shape[1:]), -1, dtype=own.dtype)
        indices = torch.from_numpy(path)
        new = experts[indices, 0, 0] < 0
        experts[indices[new]] = own[new]
    return None if experts is None else experts.unflatten(0, shape)


def count_unrecorded_experts(samples: Sequence[Sample]) -> int:
    """How many tokens have no recorded experts, so that the trainer's own routers choose them.

    A row's last token is not counted: no logprob depends on it.
    """
    return sum(
        len(sample) - 1 - sum(route is not None for route in sample.expert_routing[: len(sample) - 1])
        for sample in samples
    )


@torch.no_grad()
def response_logprobs(policy: Policy, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
    """The logprobs ``[response]``, in nats, of each sample's response tokens under ``policy``."""
    scores = []
    for sample in samples:
        batch = collate([sample], policy.family).to(policy.device)
        logprobs = policy(batch, temperature).logprobs[0, len(sample.prompt_token_ids) : len(sample)]
        scores.append(logprobs.float().cpu().numpy())
    return scores
