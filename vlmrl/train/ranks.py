"""The trainer ranks of one run: a rank's share of the micro-batches, and sums and metrics over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Rank ``rank`` of ``size``. A single process is ``Ranks()``."""

    rank: int = 0
    size: int = 1

    def shard(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This rank's share of ``items``, each with whether it counts. Neighbours are computed at the same time on different ranks.

        Every rank gets equally many, since collectives need all ranks. If there are too few, the last item is repeated without
        counting: a, b, c on two ranks are ``[(a, True), (c, True)]`` and ``[(b, True), (c, False)]``.
        """
        rounds = -(-len(items) // self.size)
        indices = [number * self.size + self.rank for number in range(rounds)]
        return [(items[min(index, len(items) - 1)], index < len(items)) for index in indices]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of ``tensor`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor


class MetricAccumulator:
    """Metrics of many micro-batches as one number each: means over trained tokens, or the maximum of names that end with ``max``.

    Two micro-batches of 1 and 3 tokens whose mean ``ratio`` is 0.8 and 1.2 have ``ratio`` 1.1.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._largest: dict[str, float] = {}

    def add(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        """``value`` is per token ``[rows, length]``, or a scalar for the micro-batch; ``mask`` is 1 for trained tokens."""
        value = value.detach()
        if name.endswith("max"):
            trained = value[mask > 0] if value.dim() else value
            largest = float(trained.max()) if mask.any() else -torch.inf
            self._largest[name] = max(self._largest.get(name, -torch.inf), largest)
        else:
            self._sums[name] += float((value * mask).sum() if value.dim() else value * mask.sum())

    def result(self, tokens: float, ranks: Ranks, device: torch.device) -> dict[str, float]:
        """The metrics over the ``tokens`` trained tokens of all ranks. Every rank must have added the same names."""
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=device)
        largest = torch.tensor(list(self._largest.values()), dtype=torch.float64, device=device)
        means = (ranks.sum(sums) / max(1.0, tokens)).tolist()
        return dict(zip(self._sums, means, strict=True)) | dict(
            zip(self._largest, ranks.max(largest).tolist(), strict=True)
        )
