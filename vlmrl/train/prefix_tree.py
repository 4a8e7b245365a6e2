"""Rows that begin alike as one tree, laid out depth-first, so that what they share is computed once.

    rows [1 2 3 4] and [1 2 5]:     layout  1 2 3 4 5,   paths  [0 1 2 3] and [0 1 4],   ends  5 5 4 4 5

A token's subtree is one interval of the layout, from itself to its ``end``, so "a token sees its ancestors" is ``key <= query <
end[key]``. Pictures count by their content: two rows share a picture's tokens only where it is the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vlmrl.model.families import merged_grid, rope_positions
from vlmrl.types import MediaItem, Sample


@dataclass(frozen=True)
class Tree:
    """``rows`` name the samples, ``paths[i]`` where each token of ``rows[i]`` lies in the layout.

    ``parents`` is the place of the token before, -1 for the first; ``media`` are the pictures in layout order.
    """

    rows: list[int]
    token_ids: np.ndarray
    position_ids: torch.Tensor
    parents: np.ndarray
    ends: np.ndarray
    paths: list[np.ndarray]
    media: list[MediaItem]

    def __len__(self) -> int:
        return len(self.token_ids)


def build(
    samples: Sequence[Sample],
    atoms: Sequence[np.ndarray],
    ordered: Sequence[int],
    image_token_id: int | None,
    merge_size: int,
) -> Tree:
    """One tree of ``samples[row]`` for each row of ``ordered``, which stand as :func:`in_order` gives them."""
    token_ids: list[np.ndarray] = []
    positions: list[torch.Tensor] = []
    parents: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    media: list[MediaItem] = []
    size = 0
    for number, row in enumerate(ordered):
        sample = samples[row]
        shared = shared_length(atoms[ordered[number - 1]], atoms[row]) if number else 0
        new = np.arange(size, size + len(sample) - shared)
        path = np.concatenate([paths[-1][:shared] if number else new[:0], new])
        grids = [merged_grid(item.mm_inputs["image_grid_thw"], merge_size) for item in sample.media]
        token_ids.append(np.array(sample.token_ids[shared:]))
        positions.append(rope_positions(sample.token_ids, grids, image_token_id)[0][:, shared:])
        parents.append(np.concatenate([[-1], path[:-1]])[shared:])
        shared_visual = int((atoms[row][:shared] < 0).sum())
        seen = np.cumsum([item.num_tokens for item in sample.media])
        media += sample.media[int(np.searchsorted(seen, shared_visual, side="right")) :]
        paths.append(path)
        size += len(new)
    ends = np.arange(1, size + 1)
    for path in paths:  # in layout order, so that a later row's end is the larger one
        ends[path] = path[-1] + 1
    return Tree(
        list(ordered), np.concatenate(token_ids), torch.cat(positions, 1), np.concatenate(parents), ends, paths, media
    )


def cut(atoms: Sequence[np.ndarray], ordered: Sequence[int], budget: int) -> list[tuple[list[int], int]]:
    """``ordered`` rows in parts whose trees hold at most ``budget`` tokens, cut where neighbours share least, with those tokens.

    A single row may be longer than the budget.
    """
    shared = [0, *(shared_length(atoms[a], atoms[b]) for a, b in pairwise(ordered))]
    new = [len(atoms[row]) - known for row, known in zip(ordered, shared, strict=True)]
    parts: list[tuple[list[int], int]] = []
    first = 0
    while first < len(ordered):
        size, last = len(atoms[ordered[first]]), first + 1
        while last < len(ordered) and size + new[last] <= budget:
            size += new[last]
            last += 1
        if last < len(ordered):  # of the cuts that leave at least half of a part, the one that repeats least
            half = first + (last - first + 1) // 2
            last = min(range(half, last + 1), key=lambda place: (shared[place], -place))
        parts.append((list(ordered[first:last]), shared[first] + sum(new[first:last])))
        first = last
    return parts


def in_order(atoms: Sequence[np.ndarray], rows: Sequence[int]) -> list[int]:
    """``rows`` sorted by their atoms: rows that begin alike stand together, a shorter one before those it begins."""
    return sorted(rows, key=lambda row: atoms[row].tolist())


def atoms_of(samples: Sequence[Sample], image_token_id: int | None) -> list[np.ndarray]:
    """A number for each token of each sample, equal where the model sees the same.

    A text token's is its id; a visual token's is negative and stands for its picture and its place in it.
    """
    firsts: dict[str, int] = {}
    used = 0
    found = []
    for sample in samples:
        atoms = np.array(sample.token_ids, dtype=np.int64)
        codes = []
        for item in sample.media:
            if item.id not in firsts:
                firsts[item.id], used = used, used + item.num_tokens
            codes.append(-1 - firsts[item.id] - np.arange(item.num_tokens))
        if codes:
            atoms[atoms == image_token_id] = np.concatenate(codes)
        found.append(atoms)
    return found


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many atoms two rows begin with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
