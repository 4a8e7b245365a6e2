"""Sampling tokens with temperature, top-k and top-p by row, from random numbers that depend on the request's seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.engine.base import SamplingParams

HEAD = 64  # tokens that are sorted for top-p, if they are enough


class RandomNumbers:
    """The random numbers of one request: token ``i`` of its response uses number ``i``, whatever else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._numbers: list[float] = []

    def __getitem__(self, index: int) -> float:
        while index >= len(self._numbers):
            self._numbers.extend(self._generator.random(64).tolist())
        return self._numbers[index]


class Sampling:
    """The sampling parameters of a batch's rows as tensors, made once for as long as the rows stay the same."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=device)[:, None]
        """``[rows, 1]``: 1 for greedy rows, whose logprobs are reported at temperature 1."""
        greedy = [p.temperature == 0 for p in params]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._filter = _Filter(params, device) if any(p.top_k or p.top_p < 1 for p in params) else None

    def draw(self, logits: torch.Tensor, numbers: Sequence[float]) -> tuple[list[int], list[float]]:
        """One token per row of ``logits`` ``[rows, vocabulary]`` (float32, after temperature and the ban), by inverting the cumulative
        distribution at each row's number in [0, 1).

        Returns ids and logprobs, in nats, of the whole distribution, before top-k and top-p.
        """
        logprobs = logits.log_softmax(-1)
        shares = logprobs.exp() if self._filter is None else self._filter(logprobs)
        cumulative = shares.double().cumsum(-1)
        drawn = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[1] - 1)
        if self._greedy is not None:
            ids = torch.where(self._greedy[:, None], logprobs.argmax(-1, keepdim=True), ids)
        both = torch.cat([ids.double(), logprobs.gather(-1, ids).double()], dim=1)  # one copy to the host, and exact
        chosen, their_logprobs = both.T.tolist()
        return [int(token) for token in chosen], their_logprobs


class _Filter:
    """Top-k and top-p of a batch's rows."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._head = max(HEAD, *(p.top_k for p in params))
        self._top_k = torch.tensor([p.top_k or 2**62 for p in params], device=device)[:, None]
        self._top_p = torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in params], device=device)[:, None]
        self._any_top_k = any(p.top_k for p in params)
        self._has_top_k = torch.tensor([p.top_k > 0 for p in params], device=device)[:, None]

    def __call__(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Probabilities: 0 outside each row's ``top_k`` likeliest tokens, and outside the smallest set of these with mass ``top_p``.

        Only the likeliest tokens are sorted. If they do not hold the whole set of every row, all are.
        """
        width = logprobs.shape[1]
        ranked, order = logprobs.topk(min(self._head, width))
        kept = self._kept(ranked)
        if order.shape[1] < width and bool((kept[:, -1:].bool() & ~self._has_top_k).any()):
            ranked, order = logprobs.sort(dim=-1, descending=True)
            kept = self._kept(ranked)
        return torch.zeros_like(logprobs).scatter_(-1, order, kept)

    def _kept(self, ranked: torch.Tensor) -> torch.Tensor:
        """The probabilities of those of each row's likeliest tokens that stay. ``ranked`` are their logprobs, largest first."""
        mass = ranked.exp()
        if self._any_top_k:
            mass *= torch.arange(ranked.shape[1], device=ranked.device) < self._top_k
        total = torch.where(self._has_top_k, mass.sum(-1, keepdim=True), 1.0)
        return mass * (mass.cumsum(-1) - mass < self._top_p * total)  # always the first
