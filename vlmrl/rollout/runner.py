"""Many groups at once: concurrency, refills of failed members, and the line at which failures stop the run."""

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

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class RolloutError(RuntimeError):
    """Too many trajectories failed."""


@dataclass
class Rollouts:
    """What one call of :meth:`Runner.play` gave: whole groups, and the trajectories that failed on the way.

    ``dropped_groups`` had a failed member; ``stopped_groups`` were stragglers of over-sampling.
    """

    groups: list[list[Trajectory]] = field(default_factory=list)
    failed: list[Trajectory] = field(default_factory=list)
    dropped_groups: int = 0
    stopped_groups: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]


class EpisodeLoop(Protocol):
    """Plays one episode per call: the turn loop, or a user's generator."""

    engine: Engine
    config: Rollout

    async def play(self, task: Task, group_id: str, trajectory_id: str) -> Trajectory: ...


class Runner:
    """Plays groups of ``group_size`` trajectories through one loop, and has whole ones judged by ``group_reward``, if there is one.

    With a :class:`LockstepBatching` engine, requests are sampled as whole batches in task order, so that a run can be repeated.
    """

    def __init__(
        self, loop: EpisodeLoop, *, group_size: int | None = None, group_reward: GroupReward | None = None
    ) -> None:
        self.loop = loop
        self.group_reward = group_reward
        self.config = loop.config
        self.group_size = group_size or self.config.group_size
        self._waves = loop.engine if isinstance(loop.engine, LockstepBatching) else None

    async def play(
        self,
        tasks: Iterator[Task],
        count: int,
        label: str,
        on_end: Callable[[Trajectory], None] = lambda trajectory: None,
        over_sampling: float = 1.0,
    ) -> Rollouts:
        """``count`` whole groups, drawing as many tasks as that needs (fewer groups only where the tasks run out).

        ``label`` begins every id; ``on_end`` is called as each trajectory ends. ``over_sampling`` times as many groups are started
        as are missing; once there are enough, the others are stopped. Raises RolloutError when more than
        ``max_failed_fraction`` of the trajectories asked for have failed, with the commonest reasons.
        """
        rollouts = Rollouts()
        at_once = (
            max(1, self.config.max_concurrent // self.group_size) if self._waves else math.ceil(count * over_sampling)
        )
        limit = at_once * self.group_size if self._waves else self.config.max_concurrent  # a wave is never cut
        slots = asyncio.Semaphore(limit)
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
            if self._waves:
                self._waves.join(len(batch) * self.group_size)
            ids = [f"{label}/{started + index:05d}" for index in range(len(batch))]
            started += len(batch)
            playing = [self.play_group(task, name, slots, ended) for task, name in zip(batch, ids, strict=True)]
            if len(batch) > missing:
                groups = await _first(playing, missing, is_whole)
                rollouts.stopped_groups += len(batch) - len(groups)
            else:
                groups = await _gather(playing)
            for group in groups:
                if is_whole(group):
                    rollouts.groups.append(group)
                else:
                    rollouts.dropped_groups += 1
        return rollouts

    async def play_group(
        self, task: Task, group_id: str, slots: asyncio.Semaphore, ended: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        """One group, of which no more members play at once than there are ``slots``; ``ended`` is told each trajectory's end."""
        members = range(self.group_size)
        group = await _gather([self._member(task, group_id, member, slots, ended) for member in members])
        if self.group_reward is not None and is_whole(group):
            await self.group_reward.give(group)
            for trajectory in filter(lambda member: member.failed, group):
                ended(trajectory)
        return group

    async def _member(
        self, task: Task, group_id: str, member: int, slots: asyncio.Semaphore, ended: Callable[[Trajectory], None]
    ) -> Trajectory:
        """One member of a group, played anew when it fails, ``max_refills`` times."""
        try:
            async with slots:
                for refill in range(self.config.max_refills + 1):
                    suffix = f".{refill}" if refill else ""
                    trajectory = await self.loop.play(task, group_id, f"{group_id}/{member:02d}{suffix}")
                    ended(trajectory)
                    if not trajectory.failed or trajectory.non_retryable:
                        break
                return trajectory
        finally:
            if self._waves:
                self._waves.drop()

    def stop_if_too_many(self, failed: list[Trajectory], asked: int) -> None:
        """Raise RolloutError when more than ``max_failed_fraction`` of those ``asked`` for have ``failed``."""
        limit = self.config.max_failed_fraction
        if len(failed) > limit * asked:
            told = (ADDRESS.sub("0x...", trajectory.error or str(trajectory.ending)) for trajectory in failed)
            reasons = Counter(told).most_common(3)
            lines = "\n".join(f"  {number}x {reason}" for reason, number in reasons)
            raise RolloutError(
                f"{len(failed)} trajectories failed where {asked} were asked for, more than rollout.max_failed_fraction ({limit:g}) "
                f"allows:\n{lines}"
            )


def is_whole(group: list[Trajectory]) -> bool:
    return not any(trajectory.failed for trajectory in group)


async def _first(
    coroutines: list[Coroutine[Any, Any, list[Trajectory]]], count: int, counts: Callable[[list[Trajectory]], bool]
) -> list[list[Trajectory]]:
    """What finished until ``count`` results count, in the order they were asked for; the others are cancelled."""
    futures = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    pending = set(futures)
    try:
        while pending and sum(counts(future.result()) for future in futures if future.done()) < count:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    results = [future.result() for future in futures if future not in pending]
    whole = [result for result in results if counts(result)][:count]
    return [result for result in results if not counts(result)] + whole


async def _gather(coroutines: list) -> list:  # type: ignore[type-arg]
    """Run all; if one raises, stop the others and raise its error alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
