"""Advantages: from one reward a trajectory to one advantage a trajectory, by groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

EPS = 1e-6


def grpo(rewards: torch.Tensor, group_ids: Sequence[str], scale_by_std: bool = True) -> torch.Tensor:
    """Reward minus the group's mean, over the group's unbiased standard deviation; a group of one keeps mean 0 and std 1.

    ``rewards`` ``[trajectories]``; the same shape comes back. Rewards 1, 0, 0, 1 give +-0.8660. ``scale_by_std=False`` leaves the
    difference as it is (Dr. GRPO, arXiv 2503.20783). Source: GRPO, arXiv 2402.03300, section 4.1.
    """
    advantages = torch.empty_like(rewards)
    names = list(group_ids)
    for name in dict.fromkeys(names):
        members = torch.tensor([other == name for other in names], device=rewards.device)
        group = rewards[members]
        centred = group - group.mean() if len(group) > 1 else group
        scale = group.std() + EPS if scale_by_std and len(group) > 1 else 1.0
        advantages[members] = centred / scale
    return advantages


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {"grpo": grpo}
