"""Where the loop takes its batches from: played when asked for, or ahead, while the trainer trains.

:class:`SynchronousBuffer` plays a batch when one is requested. :class:`AsynchronousBuffer` keeps playing while the trainer trains.
Version ``v`` is what the engine samples with after ``v`` updates; step ``v + 1`` trains version ``v``. With ``max_staleness`` S, at
most S + 1 batches of groups are started and not yet trained: groups started under version ``v`` are trained by versions ``v`` to
``v + S``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vlmrl.config import Algo, Train
from vlmrl.data import TaskStream
from vlmrl.rollout.batches import ROUNDS, Filter, Group, GroupBatch, fill, passes, repeated, too_few
from vlmrl.rollout.runner import Runner, is_whole
from vlmrl.types import Task, Trajectory


class RolloutBuffer(Protocol):
    """RolloutBuffer of groups, one for each step of the loop."""

    async def take(self, step: int) -> GroupBatch:
        """The next batch. Raises RolloutError where none can be had."""
        ...

    def trained(self) -> None:
        """The batch was trained on, and the engine has the new weights."""
        ...

    def metrics(self) -> dict[str, float]:
        """About the batch that was taken last."""
        ...

    def state(self) -> dict[str, Any]:
        """The place in the data, and what was begun and not trained, in JSON's types: for a checkpoint between two batches."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was asked, before a batch is taken."""
        ...

    async def close(self) -> None:
        """Stop what is being played."""
        ...


class SynchronousBuffer:
    """Each batch is played under the newest weights, when it is asked for."""

    def __init__(self, runner: Runner, tasks: TaskStream, filters: Sequence[Filter], algo: Algo, train: Train) -> None:
        self._runner = runner
        self._tasks = tasks
        self._filters = filters
        self._mode = algo.dynamic_sampling
        self._count = train.groups_per_batch

    async def take(self, step: int) -> GroupBatch:
        return await fill(self._runner, self._tasks, self._count, f"step{step:06d}", self._filters, self._mode)

    def trained(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return self._tasks.metrics()

    def state(self) -> dict[str, Any]:
        return {"tasks": self._tasks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._tasks.restore(state["tasks"])

    async def close(self) -> None:
        pass


class AsynchronousBuffer:
    """Groups are played without a break; a batch is taken from those that are ready.

    What becomes of groups that take long is ``train.too_old``'s choice. ``wait``: batches are taken in the order in which groups
    were started, so that none is ever older than ``max_staleness``. Otherwise whatever is ready is taken, the first started first;
    a group that has become older meanwhile is trained all the same (``correct``), or dropped (``drop``).
    """

    def __init__(self, runner: Runner, tasks: TaskStream, filters: Sequence[Filter], algo: Algo, train: Train) -> None:
        self._runner = runner
        self._tasks = tasks
        self._filters = filters
        self._mode = algo.dynamic_sampling
        self._train = train
        self._count = train.groups_per_batch
        self._slots = asyncio.Semaphore(runner.config.max_concurrent)
        self._started = 0  # so many groups; their numbers are the order in which they were started
        self._draws: dict[int, int] = {}  # which task each group plays that is not yet taken
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, Group] = {}
        self._in_training = 0
        self._batch = GroupBatch()  # what has come of the groups that are not for training, since a batch was taken
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._lengths = Lengths()
        self._idle = Idle()
        self._told: dict[str, float] = {}

    async def take(self, step: int) -> GroupBatch:
        began = time.perf_counter()
        self._admit()
        while len(chosen := self._choice()) < self._count:
            self._changed.clear()
            await self._changed.wait()
            if self._error is not None:
                raise self._error
        groups = [self._taken(number) for number in chosen]
        self._in_training = self._count
        batch, self._batch = self._batch, GroupBatch()
        batch.rollouts.groups += groups
        batch.groups = [group for group in groups if passes(group, self._filters)]
        batch.filtered += len(groups) - len(batch.groups)
        if self._mode == "replace":
            batch.groups = repeated(batch.groups, self._count)
        self._note(batch, time.perf_counter() - began)
        return batch

    def trained(self) -> None:
        self._in_training = 0
        self._admit()

    def metrics(self) -> dict[str, float]:
        return self._tasks.metrics() | self._told

    def state(self) -> dict[str, Any]:
        unfinished = {str(number): draw for number, draw in self._draws.items()}
        return {"tasks": self._tasks.state(), "started": self._started, "unfinished": unfinished}

    def restore(self, state: dict[str, Any]) -> None:
        """Groups that were not trained are played anew: an env cannot be stored in its midst."""
        self._tasks.restore(state["tasks"])
        self._started = state["started"]
        for number, draw in state["unfinished"].items():
            self._start(int(number), draw, self._tasks.at(draw))

    async def close(self) -> None:
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    def _admit(self) -> None:
        """Start as many groups as the staleness allows."""
        while len(self._draws) + self._in_training < (self._train.max_staleness + 1) * self._count:
            task = next(self._tasks)
            self._start(self._started, self._tasks.drawn - 1, task)
            self._started += 1

    def _start(self, number: int, draw: int, task: Task) -> None:
        self._draws[number] = draw
        self._idle.end()
        self._playing[number] = asyncio.create_task(self._play(number, task))

    async def _play(self, number: int, task: Task) -> None:
        try:
            group = await self._runner.play_group(task, f"group{number:06d}", self._slots, self._ended)
            self._settle(number, group)
        except Exception as error:
            self._error = error
        finally:
            del self._playing[number]
            if not self._playing:
                self._idle.begin()
            self._changed.set()

    def _ended(self, trajectory: Trajectory) -> None:
        if trajectory.failed:
            failed = self._batch.rollouts.failed
            failed.append(trajectory)
            self._runner.stop_if_too_many(failed, self._count * self._runner.group_size)

    def _settle(self, number: int, group: Group) -> None:
        """Keep a finished group for training; one that cannot be trained makes room for another."""
        rollouts = self._batch.rollouts
        if not is_whole(group):
            rollouts.dropped_groups += 1
        elif self._mode == "filter" and not passes(group, self._filters):
            self._batch.filtered += 1
            rollouts.groups.append(group)
            if self._batch.filtered >= ROUNDS * self._count:
                raise too_few(f"group {number}", len(self._ready), self._count)
        else:
            self._lengths.played(group)
            self._ready[number] = group
            return
        del self._draws[number]
        self._admit()

    def _choice(self) -> list[int]:
        """The numbers of the groups to train next, as far as they are ready."""
        if self._train.too_old == "wait":
            first = sorted(self._draws)[: self._count]
            return [number for number in first if number in self._ready]
        if self._train.too_old == "drop":
            for number in [number for number, group in self._ready.items() if self._is_too_old(group)]:
                self._taken(number)
                self._batch.too_old += 1
            self._admit()
        return sorted(self._ready)[: self._count]

    def _taken(self, number: int) -> Group:
        del self._draws[number]
        return self._ready.pop(number)

    def _is_too_old(self, group: Group) -> bool:
        return max(_ages(group, self._version)) > self._train.max_staleness

    @property
    def _version(self) -> int:
        return self._runner.loop.engine.policy_version

    def _note(self, batch: GroupBatch, waited: float) -> None:
        trajectories = [trajectory for group in batch.groups for trajectory in group]
        for group in batch.groups:
            self._lengths.trained(group)
        ages = _ages(trajectories, self._version)
        self._told = {
            "staleness/too_old": float(sum(map(self._is_too_old, batch.groups))),
            "queue/playing": float(len(self._playing)),
            "queue/ready": float(len(self._ready)),
            "idle/trainer": waited,
            "idle/rollouts": self._idle.spent(),
            **self._lengths.metrics(),
        }
        if len(ages):
            self._told |= {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


class Lengths:
    """Whether what is trained is as long as what was played, or the long ones get lost: means over all trajectories so far.

    If every second trajectory has 1 turn and every other one 3, and only the short ones are trained, ``length_bias/turns`` is 0.5.
    """

    def __init__(self) -> None:
        self._sums = {"played": np.zeros(4), "trained": np.zeros(4)}

    def played(self, group: Group) -> None:
        self._add("played", group)

    def trained(self, group: Group) -> None:
        self._add("trained", group)

    def metrics(self) -> dict[str, float]:
        """``length_bias/<what>``: the mean over what was trained, as a share of the mean over what was played."""
        (played, *of_played), (trained, *of_trained) = self._sums.values()
        names = ("turns", "sampled_tokens", "seconds")
        sums = zip(names, of_trained, of_played, strict=True)
        return {f"length_bias/{name}": float((t / trained) / (p / played)) for name, t, p in sums if t and p}

    def _add(self, kind: str, group: Group) -> None:
        for item in group:
            seconds = sum(turn.engine_seconds + turn.env_seconds for turn in item.turns)
            self._sums[kind] += (1, len(item.turns), item.num_sampled, seconds)


class Idle:
    """A watch for the seconds in which nothing is played."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        self._since = time.perf_counter()

    def end(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def spent(self) -> float:
        """Since it was asked last."""
        if self._since is not None:
            self.end()
            self.begin()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _ages(trajectories: Sequence[Trajectory], version: int) -> np.ndarray:
    """For each sampled token, how many updates the weights have had since, if ``version`` is the newest."""
    versions = [np.array(turn.policy_versions) for trajectory in trajectories for turn in trajectory.turns]
    return version - np.concatenate(versions) if versions else np.zeros(0)
