"""A reward that compares all trajectories of a group: a ranking, a pairwise judgement, a bonus for diversity.

    def shortest(group):                                  # Config(group_reward=shortest)
        lengths = [trajectory.num_sampled for trajectory in group]
        return [float(length == min(lengths)) for length in lengths]

It is called for each complete group, before filters and advantages. Its numbers are added to the trajectories' own rewards (to
replace them, let the env give 0). It gets copies of the trajectories, so that it may sort or drop their turns. A plain function runs
in a thread of its own, an ``async`` one in the event loop of all async rewards.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from vlmrl.config import Config, name_of
from vlmrl.config.code import resolve_function
from vlmrl.types import Trajectory
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.user_loop import REWARDS
from vlmrl.utils.users_line import describe_error


@dataclass(frozen=True)
class GroupReward:
    """A user's reward function of a group."""

    function: Callable[[list[Trajectory]], Any]
    timeout: float  # seconds for one call
    tries: int

    @property
    def name(self) -> str:
        return name_of(self.function)

    async def give(self, group: list[Trajectory]) -> None:
        """Set each member's ``group_reward``. If the last try fails too, all members of the group fail.

        Raises:
            ValueError: the function returned anything but one finite number for each member.
        """
        for number in range(1, self.tries + 1):
            try:
                rewards = await self._call([replace(each, turns=list(each.turns)) for each in group])
                break
            except Exception as error:
                reason = describe_error(error)
                if isinstance(error, TimeoutError):
                    reason = str(error) or f"no answer in {self.timeout:g} s"
                if number == self.tries:
                    return _fail(group, f"group_reward {self.name}: {reason}")
        for trajectory, reward in zip(group, self._checked(rewards, group), strict=True):
            _add_reward(trajectory, reward)

    async def _call(self, group: list[Trajectory]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await REWARDS.run_within(self.timeout, self.function(group))
        thread = DaemonPool("group-reward")
        try:
            async with asyncio.timeout(self.timeout):
                return await thread.run(self.function, group)
        finally:
            thread.close()

    def _checked(self, rewards: Any, group: Sequence[Trajectory]) -> list[float]:
        numbers = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        fits = isinstance(numbers, list | tuple) and len(numbers) == len(group)
        if not fits or not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
            raise ValueError(
                f"group_reward {self.name}: it must return one finite number for each of {len(group)} trajectories (group "
                f"{group[0].group_id}), but it returned {rewards!r:.200}."
            )
        return [float(number) for number in numbers]


def _add_reward(trajectory: Trajectory, reward: float) -> None:
    trajectory.group_reward = reward
    if trajectory.samples:  # rows that the rollout made already hold the trajectory's own reward
        row = trajectory.samples[-1]
        last = max(index for index, mask in enumerate(row.loss_mask) if mask)  # the last sampled token
        row.rewards[last] = row.rewards.get(last, 0.0) + reward


def _fail(group: Sequence[Trajectory], reason: str) -> None:
    for trajectory in group:
        trajectory.ending, trajectory.error = "error", reason


def resolve_group_reward(config: Config) -> GroupReward | None:
    """The function ``group_reward``, with the timeout and the retries of an env call.

    Raises ValueError if it does not exist or does not accept a list of trajectories.
    """
    if config.group_reward is None:
        return None
    function = resolve_function("group_reward", config.group_reward, ["trajectories"])
    return GroupReward(function, config.rollout.env_timeout, config.rollout.max_env_retries_per_turn + 1)
