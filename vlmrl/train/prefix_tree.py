"""Rows with common prefixes as one tree, laid out depth-first, so that a shared prefix is computed once.

    rows [1 2 3 4] and [1 2 5]:     layout  1 2 3 4 5,   paths  [0 1 2 3] and [0 1 4],   ends  5 5 4 4 5

A token's subtree is one interval of the layout, from itself to its ``end``, so a token attends to its ancestors where ``key <= query <
end[key]``. Images are compared by content: two rows share an image's tokens only if it is the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vlmrl.model.families.base import Family
from vlmrl.multimodal.renderer import image_spans
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

    ``shared[i]`` is the length of the prefix that row i shares with the row before it: :func:`shared_lengths` of rows sorted by
    :func:`in_order`, or zeros to share nothing.
    """
    token_ids: list[np.ndarray] = []
    positions: list[torch.Tensor] = []
    parents: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    media: list[MediaItem] = []
    size = 0
    for sample, known in zip(rows, shared, strict=True):
        ids = np.array(sample.token_ids, dtype=np.int64)
        new = np.arange(size, size + len(ids) - known)
        path = np.concatenate([paths[-1][:known], new]) if known else new
        token_ids.append(ids[known:])
        positions.append(family.positions(sample.token_ids, sample.media)[0][:, known:])
        parents.append(np.concatenate([[-1], path[:-1]])[known:])
        spans = image_spans(sample.token_ids, family.image_token_id, sample.media)
        media += [item for item, (start, _) in zip(sample.media, spans, strict=True) if start >= known]
        paths.append(path)
        size += len(new)
    ends = np.arange(1, size + 1)
    for path in paths:  # in layout order, so that the last row that has a token sets its end
        ends[path] = path[-1] + 1
    return Tree(np.concatenate(token_ids), torch.cat(positions, 1), np.concatenate(parents), ends, paths, media)


def cut(atoms: Sequence[np.ndarray], ordered: Sequence[int], budget: int) -> list[tuple[list[int], int]]:
    """Cut ``ordered`` rows into parts whose trees have at most ``budget`` tokens. Returns each part with its number of tokens.

    Of all such cuts this one has the fewest tokens in total, and then the fewest parts. Only a single row that is longer than the
    budget exceeds it.
    """
    lengths = [len(atoms[row]) for row in ordered]
    shared = shared_lengths([atoms[row] for row in ordered])
    # For each number of rows: the tokens and parts of their best cut, and the first row of its last part.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for last in range(len(ordered)):
        size, ways = 0, []
        for first in range(last, -1, -1):
            if first < last and size + lengths[first] > budget:
                break
            ways.append((best[first][0] + size + lengths[first], best[first][1] + 1, first))
            size += lengths[first] - shared[first]
        best.append(min(ways))
    parts: list[tuple[list[int], int]] = []
    stop = len(ordered)
    while stop:
        first = best[stop][2]
        parts.append((list(ordered[first:stop]), best[stop][0] - best[first][0]))
        stop = first
    return parts[::-1]


def in_order(atoms: Sequence[np.ndarray], rows: Sequence[int]) -> list[int]:
    """``rows`` sorted by their atoms: rows with a common prefix are adjacent, and a row precedes the rows that it is a prefix of."""
    return sorted(rows, key=lambda row: atoms[row].astype(">i8").tobytes())


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


def shared_lengths(atoms: Sequence[np.ndarray]) -> list[int]:
    """The length of the common prefix of each row and the row before it; 0 for the first."""
    return [0, *(shared_length(one, other) for one, other in pairwise(atoms))]


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of two rows."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
