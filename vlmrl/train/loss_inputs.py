"""The inputs of a loss, from the samples of a micro-batch and their logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlmrl.algos import LossInputs
from vlmrl.train.packing import per_token
from vlmrl.types import Sample, to_device


def loss_inputs(
    samples: Sequence[Sample],
    logprobs: torch.Tensor,
    before: torch.Tensor,
    reference: torch.Tensor | None,
    old_is_rollout: bool,
) -> LossInputs:
    """``before``: the trainer's logprobs before its first step on the samples; ``old_is_rollout``: ``algo.old_policy`` is rollout.

    A row of unknown rollout logprobs has ``before`` in their place, so that it is not corrected; the other rows are.
    """
    device = logprobs.device
    unknown = [sample.trajectory_id for sample in samples if sample.rollout_logprobs is None]
    if unknown and old_is_rollout:
        raise ValueError(
            f"trajectory {unknown[0]}: rollout_logprobs must be given with algo.old_policy rollout, but it is None."
        )
    rollout = to_device(per_token(samples, _rollout_logprobs), device)
    if unknown:
        is_unknown = to_device(torch.tensor([sample.rollout_logprobs is None for sample in samples]), device)
        rollout = torch.where(is_unknown[:, None], before, rollout)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=rollout if old_is_rollout else before,
        rollout_logprobs=rollout,
        advantages=to_device(per_token(samples, _advantages), device),
        loss_mask=to_device(per_token(samples, lambda sample: sample.loss_mask), device),
        ref_logprobs=reference,
    )


def _rollout_logprobs(sample: Sample) -> list[float]:
    """The rollout logprobs; 0 where they are not known."""
    return sample.rollout_logprobs or [0.0] * len(sample.response_ids)


def _advantages(sample: Sample) -> list[float]:
    if sample.advantage is None:
        raise ValueError(
            f"trajectory {sample.trajectory_id}: sample.advantage must be set before Trainer.step, but it is None."
        )
    if isinstance(sample.advantage, list):
        return sample.advantage
    return [sample.advantage] * len(sample.response_ids)
