"""Policy losses: per token, before any reduction. All tensors are ``[rows, length]``, padded with mask 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What a loss may read. Only ``logprobs`` carries a gradient; ``ref_logprobs`` is there where a reference model is."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    ref_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """``per_token`` ``[rows, length]``, and metrics of the same shape, averaged over the trained tokens by the trainer."""

    per_token: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


def ppo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r the ratio to the old policy.

    Source: PPO, arXiv 1707.06347, equation 7; the asymmetric clip is DAPO's, arXiv 2503.14476, equation 10.
    """
    ratio = torch.exp((inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain, clipped_gain = ratio * inputs.advantages, clipped * inputs.advantages
    metrics = {"clip_fraction": (clipped_gain < gain).float(), "ratio": ratio.detach()}
    return LossOutputs(-torch.minimum(gain, clipped_gain), metrics)


def sft(inputs: LossInputs) -> LossOutputs:
    """Cross entropy of the tokens with mask 1: -logprob. Advantages and ratios play no part."""
    return LossOutputs(-inputs.logprobs)


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / ref) on tokens drawn from p: unbiased, of either sign. Source: Schulman, "Approximating KL divergence", 2020."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: biased, never negative. Source: as k1."""
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(ref / p) - 1 - log(ref / p): unbiased, never negative. Source: as k1; GRPO's penalty, arXiv 2402.03300, equation 4."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_ratio) - 1 - log_ratio


LOSSES: dict[str, Callable[..., LossOutputs]] = {"ppo": ppo, "sft": sft}
KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
