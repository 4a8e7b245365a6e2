"""Plays many groups at once: limits concurrency, refills failed members, and stops the run at too many failures."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from vlmrl.config import Rollout
from vlmrl.engine.base import Engine
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.rollout.group_reward import GroupReward
from vlmrl.types import Task, Trajectory

Group = list[Trajectory]
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class RolloutError(RuntimeError):
    """Too many trajectories failed."""


@dataclass
class Rollouts:
    """The result of one call of :meth:`Runner.play`."""

    groups: list[Group] = field(default_factory=list)  # complete groups
    failed: list[Trajectory] = field(default_factory=list)  # failed trajectories, refilled or not
    dropped_groups: int = 0  # groups with a failed member
    stopped_groups: int = 0  # groups that over-sampling cancelled

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


class EpisodeLoop(Protocol):
    """Plays one episode per call: the turn loop, or a user's generator."""

    engine: Engine
    config: Rollout

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory: ...


class Runner:
    """Plays groups of ``group_size`` trajectories through one loop. Complete groups get their ``group_reward``, if there is one.

    With a :class:`LockstepBatching` engine, every batch of requests holds all live trajectories in task order, so that a run
    is reproducible.
    """

    def __init__(
        self, loop: EpisodeLoop, *, group_size: int | None = None, group_reward: GroupReward | None = None
    ) -> None:
        self.loop = loop
        self.group_reward = group_reward
        self.config = loop.config
        self.group_size = group_size or self.config.group_size
        self._lockstep = loop.engine if isinstance(loop.engine, LockstepBatching) else None

    async def play(
        self,
        tasks: Iterator[Task],
        count: int,
        label: str,
        on_end: Callable[[Trajectory], None] = lambda trajectory: None,
        over_sampling: float = 1.0,
    ) -> Rollouts:
        """Play ``count`` complete groups, or fewer if the tasks run out.

        Args:
            tasks: one task is drawn for each group that is started.
            count: the number of complete groups.
            label: the prefix of all group and trajectory ids.
            on_end: called with each trajectory as it ends.
            over_sampling: starts this many times the missing groups, and cancels the rest once there are enough.

        Raises:
            RolloutError: more than ``max_failed_fraction`` of the requested trajectories failed; the message has the commonest
                reasons.
        """
        rollouts = Rollouts()
        if self._lockstep:  # a lockstep batch holds whole groups
            at_once = max(1, self.config.max_concurrent // self.group_size)
            slots = asyncio.Semaphore(at_once * self.group_size)
        else:
            at_once = math.ceil(count * over_sampling)
            slots = asyncio.Semaphore(self.config.max_concurrent)
        started = 0

        def ended(trajectory: Trajectory) -> None:
            if trajectory.failed:
                rollouts.failed.append(trajectory)
                self.stop_if_too_many(rollouts.failed, count * self.group_size)
            on_end(trajectory)

        while len(rollouts.groups) < count:
            missing = count - len(rollouts.groups)
            batch = list(islice(tasks, min(at_once, math.ceil(missing * over_sampling))))
            if not batch:
                break
            if self._lockstep:
                self._lockstep.join(len(batch) * self.group_size)
            ids = [f"{label}/{started + index:05d}" for index in range(len(batch))]
            started += len(batch)
            playing = [self.play_group(task, name, slots, ended) for task, name in zip(batch, ids, strict=True)]
            if len(batch) > missing:
                groups = await _first_complete(playing, missing)
                rollouts.stopped_groups += len(batch) - len(groups)
            else:
                groups = await _gather(playing)
            complete = [group for group in groups if is_complete(group)]
            rollouts.groups += complete
            rollouts.dropped_groups += len(groups) - len(complete)
        return rollouts

    async def play_group(
        self, task: Task, group_id: str, slots: asyncio.Semaphore, on_end: Callable[[Trajectory], None]
    ) -> Group:
        """Play one group. ``slots`` limits how many trajectories play at once; ``on_end`` gets each trajectory as it ends."""
        members = range(self.group_size)
        group = await _gather([self._member(task, group_id, member, slots, on_end) for member in members])
        if self.group_reward is not None and is_complete(group):
            await self.group_reward.give(group)
            for trajectory in filter(lambda member: member.failed, group):
                on_end(trajectory)
        return group

    async def _member(
        self, task: Task, group_id: str, member: int, slots: asyncio.Semaphore, on_end: Callable[[Trajectory], None]
    ) -> Trajectory:
        """Play one member of a group, and refill it up to ``max_refills`` times if it fails."""
        try:
            async with slots:
                for refill in range(self.config.max_refills + 1):
                    suffix = f".{refill}" if refill else ""
                    trajectory = await self.loop.play(task, group_id, f"{group_id}/{member:02d}{suffix}")
                    on_end(trajectory)
                    if not trajectory.failed or trajectory.non_retryable:
                        break
                return trajectory
        finally:
            if self._lockstep:
                self._lockstep.drop()

    def stop_if_too_many(self, failed: list[Trajectory], requested: int) -> None:
        """Raise RolloutError if more than ``max_failed_fraction`` of the ``requested`` trajectories have ``failed``."""
        limit = self.config.max_failed_fraction
        if len(failed) > limit * requested:
            errors = (ADDRESS.sub("0x...", trajectory.error or str(trajectory.ending)) for trajectory in failed)
            reasons = "\n".join(f"  {number}x {error}" for error, number in Counter(errors).most_common(3))
            raise RolloutError(
                f"{len(failed)} trajectories failed where {requested} were requested, more than rollout.max_failed_fraction "
                f"({limit:g}) allows:\n{reasons}"
            )


def is_complete(group: Group) -> bool:
    """Whether no member failed."""
    return not any(trajectory.failed for trajectory in group)


async def _first_complete(playing: list[Coroutine[Any, Any, Group]], count: int) -> list[Group]:
    """Wait for ``count`` complete groups and cancel the others. Returns them in task order, after the incomplete ones."""
    futures = [asyncio.ensure_future(coroutine) for coroutine in playing]
    pending = set(futures)
    try:
        while pending and sum(is_complete(future.result()) for future in futures if future.done()) < count:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    groups = [future.result() for future in futures if future not in pending]
    complete = [group for group in groups if is_complete(group)][:count]
    return [group for group in groups if not is_complete(group)] + complete


async def _gather(coroutines: list) -> list:  # type: ignore[type-arg]
    """Run all. If one raises, cancel the others and raise its error alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
