"""On-policy distillation: divergences between the policy's and a teacher's distribution of a token, in nats.

A divergence takes ``logprobs`` and ``teacher_logprobs`` ``[n, classes]``, both normalized, and gives ``[n]``. Only ``logprobs`` have
a gradient. The trainer calls it on the logits of a few tokens at a time (`model/divergence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import pad

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
    return _cut(logprobs, top), _cut(teacher_logprobs, top)


def listed_and_rest(
    logprobs: torch.Tensor, ids: torch.Tensor, listed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where only the logprobs ``listed`` ``[n, k]`` of the teacher's classes ``ids`` are known, as from a server.

    The rest is what they leave of 1, and at least 1e-7, below which rounded logprobs say nothing. Classes that are banned for the
    policy, or that it does not have, count in the rest: the forward KL of one would be infinite.
    """
    mine, lowest = _cut(logprobs, ids), torch.finfo(logprobs.dtype).min
    possible = mine > lowest / 2
    listed = listed.where(possible[:, :-1], lowest)
    rest = (1 - listed.exp().sum(1, keepdim=True)).clamp(min=1e-7).log()
    return mine, torch.cat([listed, rest.where(possible[:, -1:], lowest)], dim=1)


def _cut(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The classes ``top`` and all others as one. One that ``values`` does not have gets the lowest logprob."""
    lowest = torch.finfo(values.dtype).min  # finite: an empty rest would be -inf, and 0 * -inf NaN
    size = values.shape[1]
    taken = values.gather(1, top.clamp(max=size - 1)).where(top < size, lowest)
    others = pad(values, (0, 1), value=lowest).scatter_(1, top.clamp(max=size), lowest)
    return torch.cat([taken, others.logsumexp(1, keepdim=True)], dim=1)


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


def coefficient(first: float, last: float | None, progress: float) -> float:
    """From ``first`` to ``last`` in a straight line, with ``progress`` from 0 to 1; ``first`` without a ``last``.

    The coefficient of the teacher's KL beside rewards: KDRL, arXiv 2506.02208.
    """
    return first if last is None else first + (last - first) * progress


def image_weights(gains: torch.Tensor, share: float) -> torch.Tensor:
    """Weights ``[tokens]`` of mean 1, by the ``gains``: the teacher's logprob of a token with its images minus that without.

    With them a mean over the tokens is ``share`` times the mean over those with a gain above the average, and 1 - ``share`` times
    that over the others: the few tokens that depend on an image are not lost among the many that do not.
    Source: VA-OPD, arXiv 2605.21924 (the KL is averaged within tokens of high and of low visual advantage separately); the boundary
    is ours.
    """
    high = gains > gains.mean()
    count = int(high.sum())
    if not 0 < count < len(gains):
        return torch.ones_like(gains)
    parts = share * len(gains) / count, (1 - share) * len(gains) / (len(gains) - count)
    return torch.where(high, *parts)


def add_sampled(
    inputs: LossInputs, known: torch.Tensor, coef: torch.Tensor | float, limit: float | None
) -> tuple[LossInputs, dict[str, torch.Tensor]]:
    """The inputs with ``coef`` times (log q - log p) added to the advantage of each sampled token that is ``known`` to the teacher.

    log p is the old logprob, so that the ratio of the policy-gradient loss corrects for later steps.
    Source: Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; the gradient of GKD's reverse KL by its sampled token.
    """
    assert inputs.teacher_logprobs is not None
    gain, outside = clipped((inputs.teacher_logprobs - inputs.old_logprobs) * known, limit)
    return replace(inputs, advantages=inputs.advantages + coef * gain), {"teacher/clip_fraction": outside}
