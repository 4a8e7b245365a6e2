"""Plays many groups at once: limits concurrency, refills failed members, and stops the run at too many failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from vlmrl.config import Rollout
from vlmrl.data.stream import Draw, TaskStream
from vlmrl.engine.base import Engine
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.rollout.failures import list_reasons
from vlmrl.rollout.group_reward import GroupReward
from vlmrl.types import Task, Trajectory
from vlmrl.utils.threads import as_error

Group = list[Trajectory]


class RolloutError(RuntimeError):
    """Too many trajectories failed: ``failed``, as far as they have not been reported yet."""

    def __init__(self, message: str, failed: Sequence[Trajectory] = ()) -> None:
        super().__init__(message)
        self.failed = list(failed)


@dataclass
class Rollouts:
    """The result of one call of :meth:`Runner.play`."""

    groups: list[Group] = field(default_factory=list)  # complete groups
    failed: list[Trajectory] = field(default_factory=list)  # failed trajectories, retried or not
    dropped_groups: int = 0  # groups with a failed member
    bad_rows: list[str] = field(default_factory=list)  # why the task itself failed, of those of them where it did
    rejected_groups: int = 0  # those of them whose env raised RetryTurn until no retry was left
    stopped_groups: int = 0  # groups that over-sampling cancelled

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group]

    def drop(self, group: Group) -> None:
        """Count a group with a failed member."""
        self.dropped_groups += 1
        bad = next((member.error for member in group if member.non_retryable and not member.rejected), None)
        if bad is not None:
            self.bad_rows.append(bad)
        elif any(member.rejected for member in group):
            self.rejected_groups += 1

    def add(self, other: Rollouts) -> None:
        """Add the groups, failures and counts of ``other``."""
        self.groups += other.groups
        self.failed += other.failed
        self.dropped_groups += other.dropped_groups
        self.bad_rows += other.bad_rows
        self.rejected_groups += other.rejected_groups
        self.stopped_groups += other.stopped_groups


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
        tasks: Iterator[Task | Draw] | TaskStream,
        count: int,
        label: str,
        on_end: Callable[[Trajectory], None] = lambda trajectory: None,
        over_sampling: float = 1.0,
        earlier: Rollouts | None = None,
    ) -> Rollouts:
        """Play ``count`` complete groups, or fewer if the tasks run out. A bad row counts as a failed group, without being played.

        Args:
            tasks: one task is drawn for each group that is started.
            count: the number of complete groups.
            label: the prefix of all group and trajectory ids.
            on_end: called with each trajectory as it ends.
            over_sampling: starts this many times the missing groups, and cancels the rest once there are enough.
            earlier: what was played before for the same step; its groups and failures count in the fraction that failed.

        Raises:
            RolloutError: more than ``max_failed_fraction`` of the requested trajectories failed; the message has the commonest
                reasons.
        """
        rollouts, earlier, started = Rollouts(), earlier or Rollouts(), 0
        most = math.ceil(count * over_sampling)
        at_once, slots = self._limits(most)
        requested = (len(earlier.groups) + most) * self.group_size

        def ended(trajectory: Trajectory) -> None:
            if trajectory.failed:
                rollouts.failed.append(trajectory)
                self.stop_if_too_many(earlier.failed + rollouts.failed, requested)
            on_end(trajectory)

        while len(rollouts.groups) < count:
            missing = count - len(rollouts.groups)
            wanted = min(at_once, math.ceil(missing * over_sampling))
            batch: list[Draw] = []  # kept while it is played, and with it the images of the draws
            while len(batch) < wanted and (drawn := await _take(tasks, wanted - len(batch))):
                batch += [draw for draw in drawn if draw.error is None]
                for bad in filter(lambda draw: draw.error is not None, drawn):
                    rollouts.drop(self.fail_group(bad, f"{label}/bad{bad.number:05d}", ended))
            if not batch:
                break
            if self._lockstep:
                self._lockstep.join(len(batch) * self.group_size)
            ids = [f"{label}/{started + index:05d}" for index in range(len(batch))]
            started += len(batch)
            playing = [self.play_group(draw.task, name, slots, ended) for draw, name in zip(batch, ids, strict=True)]
            if len(batch) > missing:
                groups = await _first_complete(playing, missing)
                rollouts.stopped_groups += len(batch) - len(groups)
            else:
                groups = await _gather(playing)
            rollouts.groups += filter(is_complete, groups)
            for group in groups:
                if not is_complete(group):
                    rollouts.drop(group)
        return rollouts

    def _limits(self, groups: int) -> tuple[int, asyncio.Semaphore]:
        """How many of ``groups`` are played at once, and the slots of their trajectories."""
        if self._lockstep:  # a lockstep batch holds whole groups
            at_once = max(1, self.config.max_concurrent // self.group_size)
            return at_once, asyncio.Semaphore(at_once * self.group_size)
        return groups, asyncio.Semaphore(self.config.max_concurrent)

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

    def fail_group(self, bad: Draw, group_id: str, on_end: Callable[[Trajectory], None]) -> Group:
        """The failed group of a bad row; ``on_end`` gets each of its trajectories."""
        group = []
        for member in range(self.group_size):
            name = f"{group_id}/{member:02d}"
            group.append(Trajectory(name, group_id, bad.task, ending="error", error=bad.error, non_retryable=True))
            on_end(group[-1])
        return group

    async def _member(
        self, task: Task, group_id: str, member: int, slots: asyncio.Semaphore, on_end: Callable[[Trajectory], None]
    ) -> Trajectory:
        try:
            async with slots:
                return await self.play_member(task, group_id, member, on_end)
        finally:
            if self._lockstep:
                self._lockstep.drop()

    async def play_member(
        self, task: Task, group_id: str, member: int, on_end: Callable[[Trajectory], None]
    ) -> Trajectory:
        """Play one member of a group, and refill it up to ``max_refills`` times if it fails. ``on_end`` gets each trajectory."""
        for refill in range(self.config.max_refills + 1):
            suffix = f".{refill}" if refill else ""
            trajectory = await self.loop.play(task, group_id, f"{group_id}/{member:02d}{suffix}")
            again = trajectory.failed and not trajectory.non_retryable
            trajectory.retried = again and refill < self.config.max_refills
            on_end(trajectory)
            if not trajectory.retried:
                break
        return trajectory

    def stop_if_too_many(self, failed: list[Trajectory], requested: int) -> None:
        """Raise RolloutError if more than ``max_failed_fraction`` of the ``requested`` trajectories have ``failed``.

        Those that an env rejected under greedy decoding are not counted: another try would not have helped them.
        """
        everything = failed
        failed = [trajectory for trajectory in failed if not (trajectory.rejected and trajectory.non_retryable)]
        limit = self.config.max_failed_fraction
        if len(failed) > limit * requested:
            raise RolloutError(
                f"{len(failed)} trajectories failed where {requested} were requested, more than rollout.max_failed_fraction "
                f"({limit:g}) allows:\n{list_reasons(failed)}",
                everything,
            )


async def _take(tasks: Iterator[Task | Draw] | TaskStream, count: int) -> list[Draw]:
    """The next ``count`` tasks, or fewer at the end."""
    if isinstance(tasks, TaskStream):
        return await tasks.take(count)
    return [each if isinstance(each, Draw) else Draw(0, each) for each in islice(tasks, count)]


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
    """Run all. If one raises, cancel the others and raise its error alone; a RuntimeError for a cancellation of its own code."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    try:
        return [task.result() for task in tasks]
    except asyncio.CancelledError as error:  # nobody cancelled this task, or the group would have raised it
        raise as_error(error) from None
