"""The divergence between a policy's and a teacher's distributions of tokens, over the whole vocabulary, chunk by chunk.

As in `head.py`, logits exist only for a few tokens at a time, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmrl.algos.distillation import Divergence
from vlmrl.model.head import HeadGradients, chunks, logits_of

LOGITS = (
    2**25
)  # of one chunk; both models' logits and the terms of a divergence are about eight times as many float32 numbers


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
    against: Against,
    hidden: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    banned_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's divergence in nats, and 1 where both have the same first choice: float32 ``[n]``.

    ``hidden`` ``[n, width]``, ``head`` ``[vocabulary, width]`` and ``bias`` are the policy's. Both distributions are those of
    :func:`~vlmrl.model.head.score_tokens`, at one temperature and with the same banned ids. Where the heads have different numbers of
    padded rows, both are over the ids that both have.
    """
    other, other_bias = (head, bias) if against.head is None else (against.head, against.bias)
    size = min(len(head), len(other))
    if size < max(len(head), len(other)):
        head, other = head[:size], other[:size]
        bias, other_bias = (None if each is None else each[:size] for each in (bias, other_bias))
        banned_ids = [banned for banned in banned_ids if banned < size]
    teacher = (against.hidden, other.detach(), None if other_bias is None else other_bias.detach())
    result: Any = _Divergence.apply(hidden, head, bias, teacher, against.divergence, temperature, list(banned_ids))
    return result


class _Divergence(torch.autograd.Function):
    """Its gradient is autograd's, of one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor | None,
        teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        divergence: Divergence,
        temperature: float,
        banned_ids: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states, other, other_bias = teacher
        values, agreement = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for chunk in chunks(len(hidden), head, LOGITS):
            logits = logits_of(hidden[chunk], head, bias, temperature, banned_ids)
            others = logits_of(states[chunk], other, other_bias, temperature, banned_ids)
            agreement[chunk] = (logits.argmax(1) == others.argmax(1)).float()
            values[chunk] = divergence(logits.log_softmax(1), others.log_softmax(1))
        ctx.save_for_backward(hidden, head, bias, *teacher)
        ctx.divergence, ctx.temperature, ctx.banned_ids = divergence, temperature, banned_ids
        ctx.mark_non_differentiable(agreement)
        return values, agreement

    @staticmethod
    def backward(ctx: Any, value_grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, head, bias, states, other, other_bias = ctx.saved_tensors
        gradients = HeadGradients(hidden, head, bias, ctx.needs_input_grad)
        for chunk in chunks(len(hidden), head, LOGITS):
            others = logits_of(states[chunk], other, other_bias, ctx.temperature, ctx.banned_ids).log_softmax(1)
            with torch.enable_grad():
                logits = logits_of(hidden[chunk], head, bias, ctx.temperature, ctx.banned_ids).detach().requires_grad_()
                values = ctx.divergence(logits.log_softmax(1), others)
            (grad,) = torch.autograd.grad(values, logits, value_grad[chunk])
            gradients.add(chunk, grad.div_(ctx.temperature))
        return *gradients.result(), None, None, None, None
