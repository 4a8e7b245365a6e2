"""Layers with a recurrent state over rows laid out as a tree (`train/prefix_tree.py`): a branch begins with its parent's last state.

The tokens between two branches are one sequence; a row's first sequence begins with no state. So rows that are packed side by side do
not see each other, and a shared prefix is computed once and receives the gradient of all its branches. Sequences with the same number
of branches before them run together, padded within the recurrence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn

from vlmrl.families.forks import Forks, SequenceBatch
from vlmrl.model.own_forward import Forward, use_forward
from vlmrl.model.tree_attention import Span, spans
from vlmrl.types import to_device

CHUNK = 64  # tokens that the chunked form of a recurrence computes at once: a shorter sequence costs as much


def forks(ends: torch.Tensor, context: int, device: torch.device) -> Forks:
    """The sequences of a layout. ``ends`` ``[tokens]``, in host memory: where each token's subtree ends.

    ``context``: how many tokens before its own a convolution reads.
    """
    tree, size = spans(ends.numpy()), len(ends)
    parents = _parents(tree)
    padded: list[np.ndarray] = []
    levels: list[list[SequenceBatch]] = []
    ranks: dict[int, int] = {}  # of a sequence in its level
    for level in _levels(tree, parents):
        batches: list[SequenceBatch] = []
        for _, group in groupby(level, lambda index: _size(tree[index])):
            batch = list(group)
            padded.append(_tokens([tree[index] for index in batch], size))
            above = [ranks[parents[index]] for index in batch if parents[index] >= 0]
            batches.append(SequenceBatch(_on(device, padded[-1]), _on(device, np.array(above)) if above else None))
        ranks = {index: rank for rank, index in enumerate(level)}
        levels.append(batches)
    outputs = np.concatenate([each.flatten() for each in padded])
    places = np.empty(size, dtype=np.int64)
    places[outputs[outputs < size]] = np.flatnonzero(outputs < size)
    windows, places_in_windows = _windows(tree, parents, size, context)
    return Forks(levels, *(_on(device, each) for each in (places, windows, places_in_windows)))


def _parents(tree: Sequence[Span]) -> list[int]:
    """For each span the one whose last token precedes it in its rows, -1 where a row begins."""
    found: list[int] = []
    above: list[int] = []
    for index, span in enumerate(tree):
        while above and tree[above[-1]].end <= span.first:
            above.pop()
        found.append(above[-1] if above else -1)
        above.append(index)
    return found


def _levels(tree: Sequence[Span], parents: Sequence[int]) -> list[list[int]]:
    """The spans by their number of branches before, and each level by size."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
    for index, depth in enumerate(depths):
        levels[depth].append(index)
    return [sorted(level, key=lambda index: _size(tree[index])) for level in levels]


def _size(span: Span) -> int:
    """The same number for lengths within a factor of two, counted in chunks: padding at most doubles the chunks."""
    return ((span.last - span.first - 1) // CHUNK).bit_length()


def _tokens(batch: Sequence[Span], size: int) -> np.ndarray:
    """:attr:`SequenceBatch.tokens`."""
    tokens = np.full((len(batch), max(span.last - span.first for span in batch)), size)
    for row, span in zip(tokens, batch, strict=True):
        row[: span.last - span.first] = np.arange(span.first, span.last)
    return tokens


def _windows(tree: Sequence[Span], parents: Sequence[int], size: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """:attr:`Forks.windows` and :attr:`Forks.places_in_windows`."""
    firsts = np.array([span.first for span in tree])
    before = np.append(np.arange(-1, size - 1), size)  # the token before each in its rows; none before none
    before[firsts] = [size if parent < 0 else tree[parent].last - 1 for parent in parents]
    number = np.repeat(np.arange(len(tree)), np.diff(np.append(firsts, size)))
    places = np.arange(size) + context * (number + 1)
    windows = np.full(size + context * len(tree), size)
    windows[places] = np.arange(size)
    reached = firsts
    for back in range(1, context + 1):
        reached = before[reached]
        windows[places[firsts] - back] = reached
    return windows, places


def _on(device: torch.device, indices: np.ndarray) -> torch.Tensor:
    return to_device(torch.from_numpy(indices), device)


def install_forks(
    model: nn.Module, class_name: str, run_forked: Callable[[Any, torch.Tensor, Forks], torch.Tensor]
) -> None:
    """Make the layers of this class take ``forks``.

    With forks, ``run_forked`` computes a layer over ``[tokens, hidden]``; without, the layer computes its own forward.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == class_name]
    for layer in layers:
        layer.run_forked = run_forked
    use_forward(layers, _forked)


def _forked(forward: Forward) -> Forward:
    # A compiled layer would be compiled for each tree.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(layer: Any, hidden_states: torch.Tensor, forks: Forks | None = None, **options: Any) -> Any:
        if forks is None:
            return forward(layer, hidden_states, **options)
        return layer.run_forked(layer, hidden_states[0], forks)[None]

    return run
