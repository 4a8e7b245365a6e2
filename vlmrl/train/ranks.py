"""The trainer ranks of one run: a rank's share of the micro-batches, and sums and metrics over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

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

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks, in the same order on each."""
        return list(dict.fromkeys(chain.from_iterable(self.gather(list(names)))))

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, on each of them."""
        items = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(items, item)
        return items

    def collect(self, item: Any, ranks: Sequence[int]) -> list[Any]:
        """The items of these ranks, in their order, on the first one. The others get an empty list, once the first has called this."""
        first, *others = ranks
        if self.rank != first:
            dist.send_object_list([item], dst=first)
            dist.recv_object_list([None], src=first)
            return []
        items = [item]
        for other in others:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=other)
            dist.send_object_list([None], dst=other)
            items += received
        return items


class MetricAccumulator:
    """Metrics of many micro-batches as one number each: means over trained tokens, or the maximum of names that end with ``max``.

    Two micro-batches of 1 and 3 tokens whose mean ``ratio`` is 0.8 and 1.2 have ``ratio`` 1.1.
    """

    def __init__(self) -> None:
        self._scalars: dict[str, list[torch.Tensor]] = defaultdict(list)  # a GPU's are read at the end, all at once

    def add(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        """``value`` is per token ``[rows, length]``, or a scalar for the micro-batch; ``mask`` is 1 for trained tokens."""
        value = value.detach()
        if name.endswith("max"):
            trained = mask > 0 if value.dim() else (mask > 0).any()
            number = torch.where(trained, value, -torch.inf).max()
        else:
            number = (value * mask).sum() if value.dim() else value * mask.sum()
        self._scalars[name].append(number)

    def result(self, tokens: float, ranks: Ranks, device: torch.device) -> dict[str, float]:
        """The metrics over the ``tokens`` trained tokens of all ranks, of which each may have added other names."""
        read, where = self._read(), device if ranks.size > 1 else torch.device("cpu")
        names = ranks.union(read)
        maxima = {name: max([-torch.inf, *read.get(name, [])]) for name in names if name.endswith("max")}
        sums = {name: sum(read.get(name, [])) for name in names if name not in maxima}
        summed = ranks.sum(torch.tensor(list(sums.values()), dtype=torch.float64, device=where))
        largest = ranks.max(torch.tensor(list(maxima.values()), dtype=torch.float64, device=where))
        means = (summed / max(1.0, tokens)).tolist()
        return dict(zip(sums, means, strict=True)) | dict(zip(maxima, largest.tolist(), strict=True))

    def _read(self) -> dict[str, list[float]]:
        """The numbers of all micro-batches, by one copy from the device."""
        if not self._scalars:
            return {}
        numbers = iter(torch.stack([value.double() for values in self._scalars.values() for value in values]).tolist())
        return {name: list(islice(numbers, len(values))) for name, values in self._scalars.items()}


def over_steps(name: str, values: list[float]) -> float:
    """A metric over several optimizer steps: the sum of tokens, the maximum of names that end with ``max``, else the mean."""
    if name.endswith("tokens"):
        return sum(values)
    return max(values) if name.endswith("max") else sum(values) / len(values)
