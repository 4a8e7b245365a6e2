"""Credit: from the rewards of turns to one advantage for each turn, by comparing turns of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

Compare = Callable[[torch.Tensor, Sequence[str]], torch.Tensor]
"""Advantages of rewards ``[n]`` by the names of their groups."""


def turn(
    rewards: Sequence[Sequence[float]], states: Sequence[Sequence[str]], group_ids: Sequence[str], advantage: Compare
) -> list[list[float]]:
    """One advantage per turn, from its return-to-go, compared with the same turn of the group's other trajectories.

    Arguments as in :func:`gigpo`. A turn that no other member reached has nothing to be compared with: it has the trajectory's
    advantage, as in GiGPO, arXiv 2505.10978, where a step that no other episode shares has the episode's advantage alone.
    """
    totals = advantage(torch.tensor([sum(row) for row in rewards], dtype=torch.float64), group_ids).tolist()
    names = [
        f"{group}, turn {number}" for group, row in zip(group_ids, rewards, strict=True) for number in range(len(row))
    ]
    returns = [value for row in rewards for value in _returns(row, 1.0)]
    values = iter(advantage(torch.tensor(returns, dtype=torch.float64), names).tolist())
    reaching, members = Counter(names), Counter(group_ids)
    found = []
    for group, total, row in zip(group_ids, totals, rewards, strict=True):
        alone = [reaching[f"{group}, turn {number}"] == 1 and members[group] > 1 for number in range(len(row))]
        found.append([total if is_alone else value for is_alone, value in zip(alone, values, strict=False)])
    return found


def gigpo(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[str]],
    group_ids: Sequence[str],
    advantage: Compare,
    discount: float = 0.95,
    weight: float = 1.0,
) -> list[list[float]]:
    """One advantage per turn: that of the trajectory, plus ``weight`` times that among turns of its group that began in its state.

    ``rewards`` and ``states``: for each trajectory those of its turns. ``advantage`` compares rewards within groups, as ``grpo``.
    Trajectories are compared by the sum of their rewards, turns by their discounted return: the reward of the turn ``n`` turns later
    counts ``discount ** n``. A turn whose state no other turn of the group began in has the trajectory's advantage alone.

    Source: GiGPO, arXiv 2505.10978: episode and step relative advantages, and their sum.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"algo.options gigpo.discount must be from 0 to 1, but it is {discount}.")
    totals = advantage(torch.tensor([sum(row) for row in rewards], dtype=torch.float64), group_ids).tolist()
    names = [repr((group, state)) for group, row in zip(group_ids, states, strict=True) for state in row]
    returns = [value for row in rewards for value in _returns(row, discount)]
    values = advantage(torch.tensor(returns, dtype=torch.float64), names).tolist()
    company = Counter(names)
    steps = iter([weight * value if company[name] > 1 else 0.0 for name, value in zip(names, values, strict=True)])
    return [[total + next(steps) for _ in row] for total, row in zip(totals, rewards, strict=True)]


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    """For each turn its reward and the discounted sum of all later ones."""
    returns: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        returns.append(later)
    return returns[::-1]


CREDIT: dict[str, Callable[..., list[list[float]]]] = {"turn": turn, "gigpo": gigpo}
