"""Advantages: from one reward per trajectory to one advantage per trajectory, by groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

EPS = 1e-6


def grpo(rewards: torch.Tensor, group_ids: Sequence[str], scale_by_std: bool = True) -> torch.Tensor:
    """Reward minus the group's mean, over the group's unbiased standard deviation; a group of one keeps its reward.

    ``rewards`` and the result are ``[trajectories]``. Rewards 1, 0, 0, 1 give +-0.8660. ``scale_by_std=False`` does not divide
    (Dr. GRPO, arXiv 2503.20783). Source: GRPO, arXiv 2402.03300, section 4.1.
    """

    def of_group(group: torch.Tensor) -> torch.Tensor:
        if len(group) == 1:
            return group
        return (group - group.mean()) / (group.std() + EPS if scale_by_std else 1.0)

    return _by_group(rewards, group_ids, of_group)


def rloo(rewards: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Reward minus the mean of the others in its group: 1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3. A group of one keeps its reward.

    Source: RLOO, arXiv 2402.14740.
    """

    def of_group(group: torch.Tensor) -> torch.Tensor:
        others = (group.sum() - group) / max(1, len(group) - 1)
        return group - others

    return _by_group(rewards, group_ids, of_group)


def maxrl(rewards: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Reward minus the group's mean, over that mean: 1, 0, 0, 0 give 3, -1, -1, -1, so that hard tasks have larger advantages.

    Rewards must be 0 or more. A group whose mean is 0 gives 0. Source: MaxRL, arXiv 2602.02710.
    """
    if bool((rewards < 0).any()):
        raise ValueError(
            f"maxrl divides by a group's mean reward, so rewards must be 0 or more, but one is {float(rewards.min())}."
        )

    def of_group(group: torch.Tensor) -> torch.Tensor:
        mean = group.mean()
        return (group - mean) / mean if mean > EPS else torch.zeros_like(group)

    return _by_group(rewards, group_ids, of_group)


def reinforce_pp(rewards: torch.Tensor, group_ids: Sequence[str], group_baseline: bool = False) -> torch.Tensor:
    """Rewards whitened over the whole batch: minus its mean, over its unbiased standard deviation.

    ``group_baseline`` subtracts each group's mean first. Rewards 1, 0, 0, 1 give +-0.8660. A batch of one keeps its reward.
    Source: REINFORCE++, arXiv 2501.03262.
    """
    if len(rewards) == 1:
        return rewards.clone()
    if group_baseline:
        rewards = grpo(rewards, group_ids, scale_by_std=False)
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPS)


def _by_group(
    rewards: torch.Tensor, group_ids: Sequence[str], of_group: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    advantages = torch.empty_like(rewards)
    names = {name: index for index, name in enumerate(dict.fromkeys(group_ids))}
    group_of = torch.tensor([names[name] for name in group_ids], device=rewards.device)
    for index in range(len(names)):
        members = group_of == index
        group = rewards[members]
        advantages[members] = torch.zeros_like(group) if _all_equal(group) else of_group(group)
    return advantages


def _all_equal(rewards: torch.Tensor) -> bool:
    """Whether there are several rewards, all equal: the rounding error of their mean must not be scaled up to an advantage."""
    return len(rewards) > 1 and bool((rewards == rewards[0]).all())


ADVANTAGES: dict[str, Callable[..., torch.Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp": reinforce_pp,
}
