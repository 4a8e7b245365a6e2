"""On-policy distillation: how far the policy's distribution of a token is from a teacher's, in nats.

A divergence takes ``logprobs`` and ``teacher_logprobs`` ``[n, classes]``, both normalized, and gives ``[n]``. Only ``logprobs`` have
a gradient. The trainer calls it on the logits of a few tokens at a time (`model/divergence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from vlmrl.algos.losses import LossInputs

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reverse_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || teacher) = sum p (log p - log q): the policy leaves what the teacher finds unlikely.

    Source: MiniLLM, arXiv 2306.08543, equation 1; on-policy per token, GKD, arXiv 2306.13649, section 3.
    """
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(1)


def forward_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(teacher || policy) = sum q (log q - log p): the policy covers all that the teacher finds likely.

    Source: Hinton et al., arXiv 1503.02531; on-policy per token, GKD, arXiv 2306.13649, section 3.
    """
    return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(1)


def jensen_shannon(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, weight: float = 0.5) -> torch.Tensor:
    """w KL(q || m) + (1 - w) KL(p || m) with the mixture m = w q + (1 - w) p, q the teacher and w its ``weight``.

    Divided by w it tends to :func:`forward_kl` as w goes to 0, divided by 1 - w to :func:`reverse_kl` as w goes to 1.
    Source: GKD, arXiv 2306.13649, equation 1 (generalized JSD).
    """
    mixture = torch.logaddexp(logprobs + math.log(1 - weight), teacher_logprobs + math.log(weight))
    teacher_part = teacher_logprobs.exp() * (teacher_logprobs - mixture)
    return (weight * teacher_part + (1 - weight) * logprobs.exp() * (logprobs - mixture)).sum(1)


def top_k_and_rest(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both distributions over the teacher's ``k`` most likely classes and one class of all others: ``[n, k + 1]`` each.

    A KL between them is at most that of the whole distributions, and equals it where ``k`` is the number of classes.
    Source: SDPO, arXiv 2601.20802 (top-K distillation with a tail term).
    """
    top = teacher_logprobs.topk(min(k, teacher_logprobs.shape[1]), dim=1).indices
    lowest = torch.finfo(
        logprobs.dtype
    ).min  # finite: with all classes taken the rest is empty, and 0 * -inf would be NaN

    def cut(values: torch.Tensor) -> torch.Tensor:
        rest = values.scatter(1, top, lowest).logsumexp(1, keepdim=True)
        return torch.cat([values.gather(1, top), rest], dim=1)

    return cut(logprobs), cut(teacher_logprobs)


DIVERGENCES: dict[str, Callable[..., torch.Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jensen_shannon": jensen_shannon,
}


def divergence_of(name: str, weight: float = 0.5, top_k: int | None = None) -> Divergence:
    """The divergence of this name; ``weight`` is for ``jensen_shannon``. With ``top_k``, of :func:`top_k_and_rest`."""
    divergence: Divergence = DIVERGENCES[name]
    if name == "jensen_shannon":
        divergence = partial(jensen_shannon, weight=weight)
    if top_k is None:
        return divergence
    return lambda logprobs, teacher: divergence(*top_k_and_rest(logprobs, teacher, top_k))


def clipped(values: torch.Tensor, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Values within ``[-limit, limit]``, those outside without a gradient; and which ones are outside, as 1 and 0."""
    if limit is None:
        return values, torch.zeros_like(values)
    return values.clamp(-limit, limit), (values.abs() > limit).to(values.dtype)


def add_sampled(
    inputs: LossInputs, known: torch.Tensor, coef: float, limit: float | None
) -> tuple[LossInputs, dict[str, torch.Tensor]]:
    """The inputs with ``coef`` times (log q - log p) added to the advantage of each sampled token that is ``known`` to the teacher.

    log p is the old logprob, so that the ratio of the policy-gradient loss corrects for later steps.
    Source: Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; the gradient of GKD's reverse KL by its sampled token.
    """
    assert inputs.teacher_logprobs is not None
    gain, outside = clipped((inputs.teacher_logprobs - inputs.old_logprobs) * known, limit)
    return replace(inputs, advantages=inputs.advantages + coef * gain), {"teacher/clip_fraction": outside}
