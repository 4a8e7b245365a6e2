"""Advantages: from one reward per trajectory to one advantage per trajectory, by groups; or the same per trained token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

EPS = 1e-6
Function = TypeVar("Function", bound=Callable[..., torch.Tensor])


def advantage(*, per_token: bool) -> Callable[[Function], Function]:
    """Declare that an advantage is computed per token, not per trajectory.

        @advantage(per_token=True)
        def mine(returns, group_ids, mask): ...

    It then gets ``returns`` ``[trajectories, tokens]``: at a trajectory's i-th trained token its reward minus the KL penalties of this
    and all later tokens (``algo.kl k1``); padding holds the reward. ``mask`` is 1 for trained tokens, 0 for padding. The result
    has the same shape.
    """

    def declare(function: Function) -> Function:
        vars(function)["per_token"] = per_token
        return function

    return declare


def is_per_token(function: Callable[..., torch.Tensor]) -> bool:
    """The declaration by :func:`advantage`; False without one."""
    return getattr(function, "per_token", False)


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


def none(rewards: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """0 for every trajectory: rewards are only metrics, and a teacher alone trains."""
    return torch.zeros_like(rewards)


def rloo(rewards: torch.Tensor, group_ids: Sequence[str]) -> torch.Tensor:
    """Reward minus the mean of the others in its group: 1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3. A group of one gives 0.

    Source: RLOO, arXiv 2402.14740; it does not define a group of one, which has nobody to be compared with.
    """

    def of_group(group: torch.Tensor) -> torch.Tensor:
        if len(group) == 1:
            return torch.zeros_like(group)
        return group - (group.sum() - group) / (len(group) - 1)

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


@advantage(per_token=True)
def reinforce_pp(
    returns: torch.Tensor, group_ids: Sequence[str], mask: torch.Tensor, group_baseline: bool = False
) -> torch.Tensor:
    """Returns whitened over all trained tokens of the batch: minus their mean, over their unbiased standard deviation.

    ``returns``, ``mask`` and the result are ``[trajectories, tokens]``, as for :func:`advantage`. Rewards 1 and 0 of trajectories of
    three tokens and one have mean 3/4 and standard deviation 1/2: they give 1/2, 1/2, 1/2 and -3/2. Equal returns give 0.

    ``group_baseline`` subtracts the group's mean reward (with its KL penalties) first; a group of one keeps its reward.
    Source: REINFORCE++, arXiv 2501.03262v9, equations 4 and 5; with ``group_baseline``, REINFORCE++ with baseline, equations 6 and 7,
    where the paper has the KL penalty (k2) in the loss.
    """
    if group_baseline:
        rewards = returns[:, 0]
        returns = returns - (rewards - grpo(rewards, group_ids, scale_by_std=False))[:, None]
    trained = mask > 0
    values = returns[trained]
    if len(values) < 2 or _all_equal(values):
        return torch.zeros_like(returns)
    return torch.where(trained, (returns - values.mean()) / (values.std() + EPS), torch.zeros_like(returns))


def _by_group(
    rewards: torch.Tensor, group_ids: Sequence[str], of_group: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    advantages = torch.empty_like(rewards)
    names = {name: index for index, name in enumerate(dict.fromkeys(group_ids))}
    group_of = torch.tensor([names[name] for name in group_ids], dtype=torch.long, device=rewards.device)
    for members in group_of.argsort(stable=True).split(group_of.bincount(minlength=len(names)).tolist()):
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
    "none": none,
}
