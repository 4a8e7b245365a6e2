"""Logprobs and entropies from hidden states, with the logits of only a few tokens in memory at once.

With a vocabulary of 151,936, 8,192 tokens have 5 GB of float32 logits, and autograd would keep several copies. Here logits are
computed chunk by chunk, and again in the backward pass, which is written by hand: gradients are summed over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

HALF = (torch.bfloat16, torch.float16)
LOGITS_ON_CPU, LOGITS_ON_GPU = 2**25, 2**27  # of one chunk; the peak is two or three times as many float32 numbers
CAST_ON_CPU = 2**24  # numbers of the head that are cast to float32 at once


def score_tokens(
    hidden: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: float,
    banned_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's logprob, and the entropy of its distribution: float32 ``[n]``, in nats.

    ``hidden`` ``[n, width]``, ``head`` ``[vocabulary, width]``, ``bias`` ``[vocabulary]``, ``labels`` ``[n]``. The distribution is the
    softmax of the logits divided by ``temperature``, in which ``banned_ids`` have probability 0.
    """
    result: Any = _Scores.apply(hidden, head, bias, labels, temperature, list(banned_ids))
    return result


def logits_of(
    hidden: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float | torch.Tensor,
    banned_ids: Sequence[int],
) -> torch.Tensor:
    """Float32 logits ``[n, vocabulary]``, after temperature and banned ids."""
    logits = _exact_linear(hidden, head, bias) if head.dtype in HALF else linear(hidden, head, bias).float()
    logits /= temperature
    for banned in banned_ids:  # one by one: a list would be copied to the GPU, which waits for it
        logits[:, banned] = torch.finfo(torch.float32).min
    return logits


def _exact_linear(hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Float32 logits of 16-bit factors. Rounded to bfloat16, logits from 8 to 16 would be off by up to 0.03."""
    if head.device.type != "cpu":
        logits = torch.mm(hidden, head.T, out_dtype=torch.float32)
    else:  # which has no such kernel: cast the head part by part
        logits, exact = torch.empty(len(hidden), len(head)), hidden.float()
        size = max(1, CAST_ON_CPU // head.shape[1])
        for first in range(0, len(head), size):
            logits[:, first : first + size] = exact @ head[first : first + size].float().T
    return logits if bias is None else logits.add_(bias)


class _Scores(torch.autograd.Function):
    """The gradients, with z the logits, p their softmax, H its entropy, and y the label:

    d log p_y / dz = onehot(y) - p,    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        banned_ids: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy, normalizers = (
            torch.empty(len(labels), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for chunk in chunks(len(labels), head):
            logits = logits_of(hidden[chunk], head, bias, temperature, banned_ids)
            normalizers[chunk] = logits.logsumexp(1)
            logprobs[chunk] = logits.gather(1, labels[chunk, None])[:, 0] - normalizers[chunk]
            probabilities = (logits - normalizers[chunk, None]).exp_()
            entropy[chunk] = normalizers[chunk] - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, head, bias, labels, normalizers, entropy)
        ctx.temperature, ctx.banned_ids = temperature, banned_ids
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, head, bias, labels, normalizers, entropy = ctx.saved_tensors
        gradients = HeadGradients(hidden, head, bias, ctx.needs_input_grad)
        for chunk in chunks(len(labels), head):
            logits = logits_of(hidden[chunk], head, bias, ctx.temperature, ctx.banned_ids)
            grad = (logits - normalizers[chunk, None]).exp_().neg_()  # -p
            if entropy_grad is None:
                grad *= 0 if logprob_grad is None else logprob_grad[chunk, None]
            else:
                for banned in ctx.banned_ids:
                    logits[:, banned] = 0  # finite: their p is 0, and 0 * -inf would be NaN
                logits += (entropy - normalizers)[chunk, None]  # log p + H
                logits *= entropy_grad[chunk, None]
                if logprob_grad is not None:
                    logits += logprob_grad[chunk, None]
                grad *= logits
            del logits
            if logprob_grad is not None:
                grad.scatter_add_(1, labels[chunk, None], logprob_grad[chunk, None])
            gradients.add(chunk, grad.div_(ctx.temperature))
        return *gradients.result(), None, None, None


class HeadGradients:
    """The gradients of hidden states, head and bias that ``wanted`` requests, summed over chunks of tokens."""

    def __init__(
        self, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self._inputs = hidden, head
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        self._head, self._bias = (  # float32: in bfloat16 a sum over many chunks would lose the late ones
            torch.zeros_like(weight, dtype=torch.float32) if weight is not None and is_wanted else None
            for weight, is_wanted in zip((head, bias), wanted[1:3], strict=True)
        )

    def add(self, chunk: slice, grad: torch.Tensor) -> None:
        """``grad`` is that of the chunk's logits before the temperature, ``[tokens, vocabulary]``."""
        hidden, head = self._inputs
        grad = grad.to(head.dtype)
        if self._hidden is not None:
            torch.mm(grad, head, out=self._hidden[chunk])
        if self._head is not None and head.dtype == torch.float32:
            self._head.addmm_(grad.T, hidden[chunk])
        elif self._head is not None:
            self._head += grad.T @ hidden[chunk]
        if self._bias is not None:
            self._bias += grad.sum(0)

    def result(self) -> tuple[torch.Tensor | None, ...]:
        dtype = self._inputs[1].dtype
        return self._hidden, *(None if total is None else total.to(dtype) for total in (self._head, self._bias))


def chunks(tokens: int, head: torch.Tensor, at_once: int | None = None) -> Iterator[slice]:
    """Slices of the tokens of which ``at_once`` logits are computed at once, by default what is fastest on the device."""
    if at_once is None:
        at_once = LOGITS_ON_CPU if head.device.type == "cpu" else LOGITS_ON_GPU
    size = max(1, at_once // len(head))
    return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))
