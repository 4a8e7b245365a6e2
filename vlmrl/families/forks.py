"""The sequences of a tree of rows, as a family with recurrent layers runs them; `model/tree_states.py` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Inputs ``[sequences, length, ...]``, then their initial states or None; returns outputs and final states."""


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences that run together."""

    tokens: torch.Tensor
    """``[sequences, longest]``: indices in the layout; its size for padding on the right."""
    parents: torch.Tensor | None
    """``[sequences]``: each one's parent among the sequences of the level before. None: they begin rows."""


@dataclass(frozen=True)
class Forks:
    """The sequences of a layout. ``[1 2 3 4]`` and ``[1 2 5]`` have ``[1 2]``, and at the next level ``[3 4]`` and ``[5]``."""

    levels: Sequence[Sequence[SequenceBatch]]
    """By the number of branches before; the sequences of a batch have similar lengths."""
    places: torch.Tensor
    """``[tokens]``: each token's place among the outputs of all batches, padding included."""
    windows: torch.Tensor
    """Each sequence's tokens after those that its convolution reads before them; the layout's size for none."""
    places_in_windows: torch.Tensor
    """``[tokens]``."""

    def convolve(self, inputs: torch.Tensor, convolution: nn.Conv1d) -> torch.Tensor:
        """``inputs`` ``[tokens, channels]`` through a causal convolution along each row."""
        rows = _with_zeros(inputs).index_select(0, self.windows).T[None]
        outputs: torch.Tensor = convolution(rows)[0, :, : rows.shape[2]]
        return outputs.T.index_select(0, self.places_in_windows)

    def scan(self, run: Recurrence, *inputs: torch.Tensor) -> torch.Tensor:
        """The outputs ``[tokens, ...]`` of a recurrence over ``inputs``, each ``[tokens, ...]``. Inputs of zeros must keep a state."""
        padded = [_with_zeros(each) for each in inputs]
        outputs: list[torch.Tensor] = []
        finals: list[torch.Tensor] = []
        for level in self.levels:
            states, finals = finals, []
            for batch in level:
                tokens, shape = batch.tokens.flatten(), batch.tokens.shape
                chosen = [each.index_select(0, tokens).unflatten(0, shape) for each in padded]
                initial = None if batch.parents is None else torch.cat(states).index_select(0, batch.parents)
                output, final = run(*chosen, initial)
                outputs.append(output.flatten(0, 1))
                finals.append(final)
        return torch.cat(outputs).index_select(0, self.places)


def _with_zeros(inputs: torch.Tensor) -> torch.Tensor:
    """``inputs`` and an entry of zeros, which padding selects."""
    return torch.cat([inputs, inputs.new_zeros(1, *inputs.shape[1:])])
