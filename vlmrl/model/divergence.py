"""The divergence between a policy's and a teacher's distributions of tokens, over the whole vocabulary, chunk by chunk.

As in `head.py`, logits exist only for a few tokens at a time, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmrl.algos.distillation import Divergence, listed_and_rest
from vlmrl.model.head import HeadGradients, chunks, logits_of

# Of one chunk; both models' logits and the terms of a divergence are about eight times as many float32 numbers.
LOGITS = 2**25


Compare = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a slice of the tokens and the policy's logits of them to their divergence, and to the teacher's first choices."""


@dataclass(frozen=True)
class Listed:
    """The side of a teacher that a server runs: for each of ``n`` tokens its most likely ids, the first choice first."""

    ids: torch.Tensor
    """``[n, k]``"""
    logprobs: torch.Tensor
    """``[n, k]``"""
    tokens: torch.Tensor
    """As in :class:`Against`."""
    divergence: Divergence


@dataclass(frozen=True)
class Against:
    """A teacher's side: for each of ``n`` tokens the state that it predicts the token from."""

    hidden: torch.Tensor
    """``[n, the teacher's width]``."""
    head: torch.Tensor | None
    """``[vocabulary, the teacher's width]``; None: the policy's own."""
    bias: torch.Tensor | None
    tokens: torch.Tensor
    """``[n]``, in host memory: the index of each token in the policy's flattened batch. Samples may share one."""
    divergence: Divergence


def divergence_from(
    teacher: Against | Listed,
    hidden: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    banned_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's divergence in nats, and 1 where both have the same first choice: float32 ``[n]``.

    ``hidden`` ``[n, width]``, ``head`` ``[vocabulary, width]`` and ``bias`` are the policy's. Both distributions are those of
    :func:`~vlmrl.model.head.score_tokens`, at one temperature and with the same banned ids; a server's is as it came. Where the heads
    have different numbers of padded rows, both are over the ids that both have.
    """
    if isinstance(teacher, Listed):
        result: Any = _Divergence.apply(hidden, head, bias, _with_listed(teacher), temperature, list(banned_ids))
        return result
    other, other_bias = (head, bias) if teacher.head is None else (teacher.head, teacher.bias)
    size = min(len(head), len(other))
    if size < max(len(head), len(other)):
        head, other = head[:size], other[:size]
        bias, other_bias = (None if each is None else each[:size] for each in (bias, other_bias))
        banned_ids = [banned for banned in banned_ids if banned < size]
    bans, states, divergence = list(banned_ids), teacher.hidden, teacher.divergence
    other, other_bias = other.detach(), None if other_bias is None else other_bias.detach()

    def compare(chunk: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logprobs = logits_of(states[chunk], other, other_bias, temperature, bans).log_softmax(1)
        return divergence(logits.log_softmax(1), logprobs), logprobs.argmax(1)

    result = _Divergence.apply(hidden, head, bias, compare, temperature, bans)
    return result


def _with_listed(teacher: Listed) -> Compare:
    def compare(chunk: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = teacher.ids[chunk]
        return teacher.divergence(*listed_and_rest(logits.log_softmax(1), ids, teacher.logprobs[chunk])), ids[:, 0]

    return compare


class _Divergence(torch.autograd.Function):
    """Its gradient is autograd's, of one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor | None,
        compare: Compare,
        temperature: float,
        banned_ids: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, agreement = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for chunk in chunks(len(hidden), head, LOGITS):
            logits = logits_of(hidden[chunk], head, bias, temperature, banned_ids)
            values[chunk], choices = compare(chunk, logits)
            agreement[chunk] = (logits.argmax(1) == choices).float()
        ctx.save_for_backward(hidden, head, bias)
        ctx.compare, ctx.temperature, ctx.banned_ids = compare, temperature, banned_ids
        ctx.mark_non_differentiable(agreement)
        return values, agreement

    @staticmethod
    def backward(ctx: Any, value_grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, head, bias = ctx.saved_tensors
        gradients = HeadGradients(hidden, head, bias, ctx.needs_input_grad)
        for chunk in chunks(len(hidden), head, LOGITS):
            with torch.enable_grad():
                logits = logits_of(hidden[chunk], head, bias, ctx.temperature, ctx.banned_ids).detach().requires_grad_()
                values, _ = ctx.compare(chunk, logits)
            (grad,) = torch.autograd.grad(values, logits, value_grad[chunk])
            gradients.add(chunk, grad.div_(ctx.temperature))
        return *gradients.result(), None, None, None
