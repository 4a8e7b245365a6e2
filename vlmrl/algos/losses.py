"""Policy losses: per token, before any reduction. All tensors are ``[rows, length]``, padded with mask 0.

Logprobs with mask 1 are finite: the trainer checks it (`train/finite_check.py`), since a check here would wait for a GPU each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

MAX_LOG_RATIO = 20.0
Function = TypeVar("Function", bound=Callable[..., "LossOutputs"])


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss; every tensor is ``[rows, length]``, from a row's first response token on: prompts are left out."""

    logprobs: torch.Tensor
    """The trainer's current logprobs. Only these carry a gradient."""
    old_logprobs: torch.Tensor
    """The trainer's logprobs before its first step on the batch; ``rollout_logprobs`` with ``algo.old_policy rollout``."""
    rollout_logprobs: torch.Tensor
    """The engine's logprobs from sampling."""
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    """1 where a token is trained, 0 elsewhere."""
    ref_logprobs: torch.Tensor | None = None
    """The reference model's logprobs; ``None`` without a reference model."""
    teacher_logprobs: torch.Tensor | None = None
    """The teacher's logprobs, 0 where it says nothing; ``None`` without a teacher."""


@dataclass(frozen=True)
class LossOutputs:
    """``per_token`` ``[rows, length]``, and metrics of the same shape, averaged over the trained tokens by the trainer."""

    per_token: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


def loss(*, has_ratio: bool, reduction: str = "token_mean") -> Callable[[Function], Function]:
    """Declare whether a loss weighs tokens by their ratio exp(logprobs - old_logprobs), and so corrects for an older rollout policy.

        @loss(has_ratio=False)
        def reinforce(inputs): ...

    A loss without this declaration can be trained, but is never relied on as a correction. ``reduction``: a name in
    :data:`~vlmrl.algos.reductions.REDUCTIONS`, that of its source, which ``algo.reduction`` is unless it is set.
    """

    def declare(function: Function) -> Function:
        vars(function).update(has_ratio=has_ratio, reduction=reduction)
        return function

    return declare


def has_ratio(function: Callable[..., LossOutputs]) -> bool | None:
    """The declaration by :func:`loss`; ``None`` without one."""
    return getattr(function, "has_ratio", None)


def reduction_of(function: Callable[..., LossOutputs]) -> str:
    """The reduction of the loss's source; ``token_mean`` where it declares none."""
    return getattr(function, "reduction", "token_mean")


@loss(has_ratio=True)
def ppo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r the ratio to the old policy.

    Source: PPO, arXiv 1707.06347, equation 7; the asymmetric clip is DAPO's, arXiv 2503.14476, equation 10.
    """
    return _clipped(inputs.logprobs - inputs.old_logprobs, inputs.advantages, clip_low, clip_high)


@loss(has_ratio=True)
def dual_clip(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, c: float = 3.0) -> LossOutputs:
    """:func:`ppo`, bounded by -c A where the advantage is negative, so that a huge ratio cannot dominate the batch.

    Source: Ye et al., "Mastering Complex Control in MOBA Games", arXiv 1912.09729.
    """
    clipped = ppo(inputs, clip_low, clip_high)
    bound = -c * inputs.advantages
    bounded = (inputs.advantages < 0) & (clipped.per_token > bound)
    metrics = clipped.metrics | {"dual_clip_fraction": bounded.to(inputs.logprobs.dtype)}
    return LossOutputs(torch.where(bounded, bound, clipped.per_token), metrics)


@loss(has_ratio=True, reduction="sequence_mean")
def gspo(inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutputs:
    """:func:`ppo` with one ratio per row, the geometric mean of its tokens' ratios, in the form that gives each token a gradient.

    The sequence is a row: an episode with concat samples, a turn with step-wise samples.
    Source: GSPO, arXiv 2507.18071, equations 7 and 13 (GSPO-token), a mean over sequences (equations 5 and 10).
    """
    mask = inputs.loss_mask
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    difference = torch.where(mask > 0, inputs.logprobs - inputs.old_logprobs, 0.0)
    log_ratio = difference.sum(1, keepdim=True) / tokens
    token_form = inputs.logprobs - inputs.logprobs.detach() + log_ratio.detach()
    return _clipped(token_form, inputs.advantages, clip_low, clip_high)


@loss(has_ratio=True)
def cispo(inputs: LossInputs, ratio_min: float = 0.0, ratio_max: float = 5.0) -> LossOutputs:
    """-sg(clip(r, ratio_min, ratio_max)) A log p: the weight is clipped, and every token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4; the bound of 5 is ScaleRL's, arXiv 2510.13786.
    """
    ratio = _ratio(inputs).detach()
    clipped = ratio.clamp(ratio_min, ratio_max)
    metrics = {"clip_fraction": (clipped != ratio).to(ratio.dtype), "ratio": ratio}
    return LossOutputs(-clipped * inputs.advantages * inputs.logprobs, metrics)


@loss(has_ratio=True, reduction="sequence_mean")
def sapo(inputs: LossInputs, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossOutputs:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip, with one tau for each sign of the advantage.

    At r = 1 its gradient equals that of -r A. Source: SAPO, arXiv 2511.20347, a mean over sequences of their tokens' means.
    """
    ratio = _ratio(inputs)
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossOutputs(-gate * inputs.advantages, {"ratio": ratio.detach()})


@loss(has_ratio=True)
def dppo_tv(inputs: LossInputs, limit: float = 0.15, ratio_max: float = 20.0) -> LossOutputs:
    """-sg(r) A log p, and 0 where the token's probability has already moved by more than ``limit`` in the advantage's direction.

    The move is the total variation of the binary distribution "this token or another" from the old policy, which in the paper
    is the rollout policy (``algo.old_policy rollout``). ``ratio_max`` truncates the weight.
    Source: DPPO, "Rethinking the Trust Region in LLM RL", arXiv 2602.04879 (binary TV).
    """
    p, old = inputs.logprobs.detach().exp(), inputs.old_logprobs.exp()
    return _trust_region(inputs, (p - old).abs() > limit, ratio_max)


@loss(has_ratio=True)
def dppo_kl(inputs: LossInputs, limit: float = 0.05, ratio_max: float = 20.0) -> LossOutputs:
    """:func:`dppo_tv` with KL(old || new) of the binary distribution, in nats, in place of total variation.

    Source: arXiv 2602.04879 (binary KL).
    """
    p, old = (x.detach().exp().clamp(1e-8, 1 - 1e-7) for x in (inputs.logprobs, inputs.old_logprobs))
    kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
    return _trust_region(inputs, kl > limit, ratio_max)


@loss(has_ratio=False)
def reinforce(inputs: LossInputs) -> LossOutputs:
    """-A log p. Source: Williams, 1992. On-policy only: a second step on the same samples is biased."""
    return LossOutputs(-inputs.advantages * inputs.logprobs)


@loss(has_ratio=False)
def sft(inputs: LossInputs) -> LossOutputs:
    """Cross entropy of the tokens with mask 1: -logprob. Advantages and ratios are not used."""
    return LossOutputs(-inputs.logprobs)


def _ratio(inputs: LossInputs) -> torch.Tensor:
    return torch.exp((inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> LossOutputs:
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    gain, clipped_gain = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    metrics = {"clip_fraction": (clipped_gain < gain).to(ratio.dtype), "ratio": ratio.detach()}
    return LossOutputs(-torch.minimum(gain, clipped_gain), metrics)


def _trust_region(inputs: LossInputs, far: torch.Tensor, ratio_max: float) -> LossOutputs:
    ratio = _ratio(inputs).detach()
    onward = torch.where(inputs.advantages > 0, ratio > 1, ratio < 1)
    kept = (~(far & onward)).to(ratio.dtype)
    metrics = {"clip_fraction": 1 - kept, "ratio": ratio}
    return LossOutputs(-kept * ratio.clamp(max=ratio_max) * inputs.advantages * inputs.logprobs, metrics)


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / ref) on tokens drawn from p: unbiased, of either sign. For the reward only.

    In the loss, its gradient is that of log p, whose mean over tokens drawn from p is 0, whatever the reference is.
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: biased, never negative. Source: as k1."""
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(ref / p) - 1 - log(ref / p): unbiased, never negative. Source: as k1; GRPO's penalty, arXiv 2402.03300, equation 4."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_ratio) - 1 - log_ratio


def kl_abs(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """|log(p / ref)|: a distance, not an estimate of the KL."""
    return (logprobs - ref_logprobs).abs()


LOSSES: dict[str, Callable[..., LossOutputs]] = {
    "ppo": ppo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
    "sft": sft,
}
KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
}
