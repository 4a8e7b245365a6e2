"""Rows with common prefixes as one tree, laid out depth-first, so that a shared prefix is computed once.

    rows [1 2 3 4] and [1 2 5]:     layout  1 2 3 4 5,   paths  [0 1 2 3] and [0 1 4],   ends  5 5 4 4 5

A token's subtree is one interval of the layout, from itself to its ``end``, so a token attends to its ancestors where ``key <= query <
end[key]``. Images are compared by content: two rows share an image's tokens only if it is the same image.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from vlmrl.families.base import Family
from vlmrl.multimodal.placeholders import image_spans
from vlmrl.types import MediaItem, Sample


@dataclass(frozen=True)
class Tree:
    """The layout of one or more trees; arrays are per token of the layout."""

    token_ids: np.ndarray
    position_ids: torch.Tensor
    parents: np.ndarray
    """The index of the previous token of the row, -1 for a row's first token."""
    ends: np.ndarray
    """The index after the last token of the subtree."""
    paths: list[np.ndarray]
    """``paths[i]`` are the indices of row ``i``'s tokens."""
    media: list[MediaItem]
    """The images in layout order."""

    def __len__(self) -> int:
        return len(self.token_ids)


def build_tree(rows: Sequence[Sample], shared: Sequence[int], family: Family) -> Tree:
    """One tree, or several side by side.

    ``shared[i]`` is the length of the prefix that row i shares with the row before it: :meth:`PrefixOrder.shared_lengths` of sorted
    rows, or zeros to share nothing. Only what is new in a row is computed.
    """
    token_ids: list[int] = []
    new_positions: list[torch.Tensor] = []
    parents: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    media: list[MediaItem] = []
    path, positions, starts = np.empty(0, dtype=np.int64), torch.empty(3, 0, dtype=torch.long), list[int]()
    for sample, known in zip(rows, shared, strict=True):
        new_ids = sample.token_ids[known:]
        del starts[bisect_left(starts, known) :]  # of the images in the shared prefix
        new_media = sample.media[len(starts) :]
        starts += [known + start for start, _ in image_spans(new_ids, family.image_token_id, new_media)]
        media += new_media
        own = np.arange(len(token_ids), len(token_ids) + len(new_ids))
        path = np.concatenate([path[:known], own])
        parents.append(np.concatenate([[-1], path])[known:-1])
        next_position = int(positions[:, known - 1].max()) + 1 if known else 0
        new_positions.append(family.positions(new_ids, new_media, next_position)[0])
        positions = torch.cat([positions[:, :known], new_positions[-1]], 1)
        token_ids += new_ids
        paths.append(path)
    ends = np.arange(1, len(token_ids) + 1)
    for path in paths:  # in layout order, so that the last row that has a token sets its end
        ends[path] = path[-1] + 1
    return Tree(np.array(token_ids), torch.cat(new_positions, 1), np.concatenate(parents), ends, paths, media)


class PrefixOrder:
    """Rows sorted by their atoms: rows with a common prefix are adjacent, and a row precedes the rows that it is a prefix of.

    All comparisons of atoms happen here, once: the prefix that two rows share is the least that neighbours between them share.
    """

    def __init__(self, atoms: Sequence[np.ndarray]) -> None:
        self.lengths = [len(row) for row in atoms]
        keys = [row.astype(">i8").tobytes() for row in atoms]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self._rank = {row: rank for rank, row in enumerate(order)}
        self._shared = np.array([0, *(shared_length(atoms[a], atoms[b]) for a, b in pairwise(order))])

    def sort(self, rows: Iterable[int]) -> list[int]:
        return sorted(rows, key=self._rank.__getitem__)

    def shared_lengths(self, ordered: Sequence[int]) -> list[int]:
        """The length of the common prefix of each of the sorted rows and the row before it; 0 for the first."""
        ranks = [self._rank[row] for row in ordered]
        shared = np.minimum.reduceat(self._shared[: ranks[-1] + 1], [0, *(rank + 1 for rank in ranks[:-1])])
        return [0, *shared[1:].tolist()]


def cut(order: PrefixOrder, rows: Sequence[int], budget: int) -> list[tuple[list[int], int]]:
    """Cut rows into parts whose trees have at most ``budget`` tokens. Returns each part, sorted, with its number of tokens.

    Of all such cuts of the sorted rows this one has the fewest tokens in total, and then the fewest parts. Only a single row that is
    longer than the budget exceeds it.
    """
    ordered = order.sort(rows)
    shared = order.shared_lengths(ordered)
    new = [order.lengths[row] - known for row, known in zip(ordered, shared, strict=True)]
    sums = [0, *accumulate(new)]  # rows first to last - 1 have sums[last] - sums[first] + shared[first] tokens
    # For each number of rows: the tokens and parts of their best cut, and the first row of its last part.
    best = [(0, 0, 0)]
    # First rows of a last part, best first; a later and better one replaces others.
    ways: deque[tuple[int, int, int]] = deque()
    for last in range(1, len(sums)):
        first = last - 1
        way = (best[first][0] - sums[first] + shared[first], best[first][1] + 1, first)
        while ways and ways[-1] > way:
            ways.pop()
        ways.append(way)
        while ways[0][2] < first and sums[last] - sums[ways[0][2]] + shared[ways[0][2]] > budget:
            ways.popleft()
        best.append((ways[0][0] + sums[last], *ways[0][1:]))
    parts: list[tuple[list[int], int]] = []
    stop = len(ordered)
    while stop:
        first = best[stop][2]
        parts.append((ordered[first:stop], best[stop][0] - best[first][0]))
        stop = first
    return parts[::-1]


def atoms_of(samples: Sequence[Sample], image_token_id: int | None) -> list[np.ndarray]:
    """A number for each token of each sample, equal where the model's input is the same.

    A text token's number is its id. A visual token's is negative and identifies its image and its index in the image.
    """
    firsts: dict[str, int] = {}
    used = 0
    found = []
    for sample in samples:
        atoms = np.array(sample.token_ids, dtype=np.int64)
        spans = image_spans(sample.token_ids, image_token_id, sample.media)
        for item, (start, end) in zip(sample.media, spans, strict=True):
            if item.id not in firsts:
                firsts[item.id], used = used, used + item.num_tokens
            atoms[start:end] = -1 - firsts[item.id] - np.arange(item.num_tokens)
        found.append(atoms)
    return found


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of two rows."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
