"""The trainer processes of one run, as each of them sees itself: who it is, what it takes, and sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Process ``rank`` of ``size``. A process alone is ``Ranks()``."""

    rank: int = 0
    size: int = 1

    def deal(self, parts: Sequence[T]) -> list[tuple[T, bool]]:
        """This rank's share of ``parts``, which stand in order of their cost: neighbours are computed at the same time.

        Every rank gets equally many. Where they do not come out even, the last part is computed once more and does not count:
        parts a, b, c on two ranks are ``[(a, True), (c, True)]`` and ``[(b, True), (c, False)]``.
        """
        rounds = -(-len(parts) // self.size)
        places = [number * self.size + self.rank for number in range(rounds)]
        return [(parts[min(place, len(parts) - 1)], place < len(parts)) for place in places]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``tensor``, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of every rank's ``tensor``, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor
