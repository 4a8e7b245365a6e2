"""Sampling tokens with temperature, top-k and top-p by row, from random numbers that depend on the request's seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.engine.base import SamplingParams


class Draws:
    """The random numbers of one request: token ``i`` of its reply uses number ``i``, whatever else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._numbers: list[float] = []

    def __getitem__(self, index: int) -> float:
        while index >= len(self._numbers):
            self._numbers.extend(self._generator.random(64).tolist())
        return self._numbers[index]


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row of ``logits`` ``[rows, vocabulary]`` (float32, after temperature and the ban), by inverting the
    cumulative distribution at each row's number in [0, 1).

    Returns ids and logprobs, in nats, of the whole distribution, before top-k and top-p.
    """
    logprobs = logits.log_softmax(-1)
    allowed = logprobs
    if any(p.top_k or p.top_p < 1 for p in params):
        allowed = _filter(logprobs, params)
    cumulative = allowed.exp().double().cumsum(-1)
    drawn = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    ids = torch.where(greedy, logprobs.argmax(-1), ids)
    return ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist()


def temperatures(params: Sequence[SamplingParams], device: torch.device) -> torch.Tensor:
    """Temperatures ``[rows, 1]``: 1 for greedy rows, whose logprobs are reported at temperature 1."""
    return torch.tensor([p.temperature or 1.0 for p in params], device=device)[:, None]


def _filter(logprobs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """``logprobs`` with -inf outside each row's ``top_k`` likeliest tokens, and outside the smallest set with mass ``top_p``."""
    ranked, order = logprobs.sort(dim=-1, descending=True)
    width = logprobs.shape[1]
    top_k = torch.tensor([p.top_k or width for p in params], device=logprobs.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=logprobs.device)[:, None]
    ranked = ranked.masked_fill(torch.arange(width, device=logprobs.device) >= top_k, -torch.inf)
    mass = ranked.softmax(-1)
    ranked = ranked.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf)  # never the first
    return torch.empty_like(logprobs).scatter_(-1, order, ranked)
