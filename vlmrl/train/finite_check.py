"""The check that logprobs are finite, with one GPU synchronization per mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.algos import LossInputs
from vlmrl.train.ranks import Ranks
from vlmrl.types import Sample

NAMES = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")


class FiniteCheck:
    """Checks every micro-batch for logprobs of trained tokens that are not finite, and reads the result at the end."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[Sample], list[str], int]] = []  # rows, names, length
        self._found: list[torch.Tensor] = []  # of each part: whether there is one, the index of the first, its value

    def add(self, samples: Sequence[Sample], inputs: LossInputs) -> None:
        """``samples`` are the rows of ``inputs``."""
        names = [name for name in NAMES if getattr(inputs, name) is not None]
        values = torch.stack([getattr(inputs, name).detach() for name in names])
        wrong = (~values.isfinite() & (inputs.loss_mask > 0)).flatten()
        first = wrong.byte().argmax(0, keepdim=True)
        self._parts.append((samples, names, values.shape[2]))
        self._found.append(torch.cat([wrong.any()[None].double(), first.double(), values.flatten()[first].double()]))

    def error(self) -> str | None:
        """What is wrong with the first logprob that is not finite; ``None`` if all are."""
        read = torch.stack(self._found).tolist()
        for (samples, names, length), (is_wrong, index, value) in zip(self._parts, read, strict=True):
            if is_wrong:
                name, row, column = map(int, np.unravel_index(int(index), (len(names), len(samples), length)))
                return (
                    f"trajectory {samples[row].trajectory_id}, response token {column}: {names[name]} must be finite, but it is "
                    f"{value}."
                )
        return None

    def error_on_any(self, ranks: Ranks, device: torch.device) -> str | None:
        """The same on every rank, if one has an error: the others would wait for it in a collective."""
        error = self.error()
        found = torch.tensor(float(error is not None), device=device if ranks.size > 1 else torch.device("cpu"))
        if not ranks.max(found):
            return None
        return error or "another rank found a logprob that is not finite: its error names the trajectory."
