"""Metrics of many micro-batches, on many ranks, as one number each."""

from __future__ import annotations

from collections import defaultdict

import torch

from vlmrl.train.ranks import Ranks


class MetricAccumulator:
    """Means over trained tokens. A name that ends with ``max`` is the largest value instead.

    Two micro-batches of 1 and 3 tokens whose mean ``ratio`` is 0.8 and 1.2 have ``ratio`` 1.1.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._largest: dict[str, float] = {}

    def add(self, name: str, value: torch.Tensor, mask: torch.Tensor) -> None:
        """``value`` is per token ``[rows, length]``, or one number for the micro-batch; ``mask`` marks the trained tokens."""
        value = value.detach()
        if name.endswith("max"):
            largest = float(value.max()) if mask.any() else -torch.inf
            self._largest[name] = max(self._largest.get(name, -torch.inf), largest)
        else:
            self._sums[name] += float((value * mask).sum() if value.dim() else value * mask.sum())

    def result(self, tokens: float, ranks: Ranks, device: torch.device) -> dict[str, float]:
        """Over ``tokens`` trained tokens on all ranks, each of which has tallied the same names."""
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=device)
        largest = torch.tensor(list(self._largest.values()), dtype=torch.float64, device=device)
        means = (ranks.sum(sums) / max(1.0, tokens)).tolist()
        return dict(zip(self._sums, means, strict=True)) | dict(
            zip(self._largest, ranks.max(largest).tolist(), strict=True)
        )
