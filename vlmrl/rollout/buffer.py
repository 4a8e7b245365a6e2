"""The buffers from which the training loop takes batches: synchronous, or asynchronous with a staleness limit.

:class:`SynchronousBuffer` plays a batch when one is requested. :class:`AsynchronousBuffer` keeps playing while the trainer trains.
The engine has policy version ``v`` after ``v`` weight updates; step ``v + 1`` trains version ``v``. With ``max_staleness`` S, at
most S + 1 batches of groups are started and not yet trained: groups started under version ``v`` are trained by versions ``v`` to
``v + S``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmrl.config import Algo, Train
from vlmrl.data import TaskStream
from vlmrl.rollout.batches import Filter, GroupBatch, check_rejected, fill, passes, repeated
from vlmrl.rollout.runner import Group, Runner, is_complete
from vlmrl.types import Trajectory
from vlmrl.utils.threads import as_error


class SynchronousBuffer:
    """Supplies one batch of groups for each step of the training loop: it plays each when it is taken, with the newest weights."""

    def __init__(self, runner: Runner, tasks: TaskStream, filters: Sequence[Filter], algo: Algo, train: Train) -> None:
        self._runner = runner
        self._tasks = tasks
        self._filters = filters
        self._mode = algo.dynamic_sampling
        self._train = train
        self._count = train.groups_per_batch
        self._started = 0  # groups that asynchronous training has started, which are numbered in this order
        self._restored: list[tuple[int, int]] = []  # numbers and draws of a checkpoint's groups to be played again

    async def take(self, step: int) -> GroupBatch:
        """The next batch. Raises RolloutError if too many trajectories fail or too few groups pass the filters."""
        return await fill(self._runner, self._tasks, self._count, f"step{step:06d}", self._filters, self._mode)

    def trained(self) -> None:
        """Called when the last batch was trained on and the engine has the new weights."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch."""
        return self._tasks.metrics()

    def state(self) -> dict[str, Any]:
        """The position in the data and the groups that were started and not trained, as JSON types, for a checkpoint."""
        waiting = [(number, draw) for number, draw in self._restored if self._tasks.is_returned(draw)]
        return self._state(waiting)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`; called before the first batch is taken. Groups that were not trained are played first."""
        self._load(state)
        self._tasks.give_back(draw for _, draw in self._restored)

    def _state(self, unfinished: Sequence[tuple[int, int]]) -> dict[str, Any]:
        numbers = {str(number): draw for number, draw in unfinished}
        return {"tasks": self._tasks.state(), "started": self._started, "unfinished": numbers}

    def _load(self, state: dict[str, Any]) -> None:
        self._tasks.restore(state["tasks"])
        self._started = state.get("started") or 0
        self._restored = sorted((int(number), draw) for number, draw in (state.get("unfinished") or {}).items())

    async def close(self) -> None:
        """Cancel the groups that are being played."""
        self._tasks.close()


class AsynchronousBuffer(SynchronousBuffer):
    """Plays groups all the time; a batch consists of finished groups.

    ``train.too_old`` decides about slow groups. ``wait``: batches are taken in the order in which groups were started, so that no
    group exceeds ``max_staleness``. ``correct`` and ``drop``: finished groups are taken, the earliest started first; a group that
    exceeds ``max_staleness`` is then trained with corrections, or dropped.
    """

    def __init__(self, runner: Runner, tasks: TaskStream, filters: Sequence[Filter], algo: Algo, train: Train) -> None:
        super().__init__(runner, tasks, filters, algo, train)
        self._slots = asyncio.Semaphore(runner.config.max_concurrent)
        self._draws: dict[int, int] = {}  # for each group that is not yet taken: the number of its task's draw
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, Group] = {}
        self._in_training = 0
        self._batch = GroupBatch()  # failed and filtered groups since the last batch was taken
        self._ready_before: set[int] = set()  # the groups that had finished by then
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._length_bias = LengthBias()
        self._idle = IdleTimer()
        self._metrics: dict[str, float] = {}

    async def take(self, step: int) -> GroupBatch:
        began = time.perf_counter()
        self._admit()
        while self._error is None and len(numbers := self._next_numbers()) < self._count:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:  # of a group that may have ended long ago, while the loop trained
            raise self._error
        groups = [self._pop(number) for number in numbers]
        self._ready_before = set(self._ready)
        self._in_training = self._count
        batch, self._batch = self._batch, GroupBatch()
        batch.rollouts.groups += groups
        batch.groups = [group for group in groups if passes(group, self._filters)]
        batch.filtered += len(groups) - len(batch.groups)
        if self._mode == "replace":
            batch.groups = repeated(batch.groups, self._count)
        self._update_metrics(batch, time.perf_counter() - began)
        return batch

    def trained(self) -> None:
        self._in_training = 0
        self._admit()

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self._metrics

    def state(self) -> dict[str, Any]:
        return self._state([*self._draws.items(), *self._restored])

    def restore(self, state: dict[str, Any]) -> None:
        """Restart groups that were not trained from their beginning: a checkpoint cannot hold the state of an env."""
        self._load(state)
        self._admit()

    async def close(self) -> None:
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await super().close()

    def _admit(self) -> None:
        """Start as many groups as ``max_staleness`` allows."""
        while len(self._draws) + self._in_training < (self._train.max_staleness + 1) * self._count:
            if self._restored:  # more than fit, after a resume with a smaller `max_staleness` or batch
                self._start(*self._restored.pop(0))
            else:
                self._start(self._started, self._tasks.claim())
                self._started += 1

    def _start(self, number: int, draw: int) -> None:
        self._draws[number] = draw
        self._idle.stop()
        self._playing[number] = asyncio.create_task(self._play(number))

    async def _play(self, number: int) -> None:
        played: dict[str, Trajectory] = {}  # by id, failed members that were retried included

        def ended(trajectory: Trajectory) -> None:
            played[trajectory.id] = trajectory
            self._ended(trajectory)

        try:
            while (draw := await self._tasks.load(self._draws[number])) is None:  # its prompt is too long
                self._draws[number] = self._tasks.claim()
            name = f"group{number:06d}"
            if draw.error is None:
                group = await self._runner.play_group(draw.task, name, self._slots, ended)
            else:
                group = self._runner.fail_group(draw, name, ended)
            self._length_bias.add_played(list(played.values()))
            self._settle(number, group)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also the panic of an extension in Rust: `take` waits for this group
            self._error = as_error(error)
        finally:
            del self._playing[number]
            if not self._playing:
                self._idle.start()
            self._changed.set()

    def _ended(self, trajectory: Trajectory) -> None:
        if trajectory.failed:
            rollouts = self._batch.rollouts
            rollouts.failed.append(trajectory)
            in_play = len(self._draws.keys() - self._ready_before)  # since then, of up to `max_staleness` + 1 batches
            requested = (len(rollouts.groups) + max(in_play, self._count)) * self._runner.group_size
            self._runner.stop_if_too_many(rollouts.failed, requested)

    def _settle(self, number: int, group: Group) -> None:
        """Keep a finished group for training, or start another one in place of a failed or filtered group."""
        rollouts = self._batch.rollouts
        if not is_complete(group):
            rollouts.drop(group)
        elif self._mode == "filter" and not passes(group, self._filters):
            self._batch.filtered += 1
            rollouts.groups.append(group)
            if len(self._ready) < self._count:
                check_rejected(f"group {number}", self._batch, len(self._ready), self._count)
        else:
            self._ready[number] = group
            return
        del self._draws[number]
        self._admit()

    def _next_numbers(self) -> list[int]:
        """The numbers of the finished groups that the next batch takes, at most ``_count``."""
        if self._train.too_old == "wait":
            first = sorted(self._draws)[: self._count]
            return [number for number in first if number in self._ready]
        if self._train.too_old == "drop":
            for number in [number for number, group in self._ready.items() if self._is_too_old(group)]:
                self._pop(number)
                self._batch.too_old += 1
            self._admit()
        return sorted(self._ready)[: self._count]

    def _pop(self, number: int) -> Group:
        del self._draws[number]
        return self._ready.pop(number)

    def _is_too_old(self, group: Group) -> bool:
        return max(_staleness(group, self._version)) > self._train.max_staleness

    @property
    def _version(self) -> int:
        return self._runner.loop.engine.policy_version

    def _update_metrics(self, batch: GroupBatch, waited: float) -> None:
        for group in batch.groups:
            self._length_bias.add_trained(group)
        staleness = _staleness(batch.trajectories, self._version)
        self._metrics = {
            "staleness/too_old": float(sum(map(self._is_too_old, batch.groups))),
            "queue/playing": float(len(self._playing)),
            "queue/ready": float(len(self._ready)),
            "idle/trainer": waited,
            "idle/rollouts": self._idle.take(),
            **self._length_bias.metrics(),
        }
        if len(staleness):
            self._metrics |= {"staleness/mean": float(staleness.mean()), "staleness/max": float(staleness.max())}


class LengthBias:
    """Compares the mean length of trained trajectories with that of all played ones: below 1, long trajectories are lost.

    If half of the trajectories have 1 turn and half have 3, and only the short ones are trained, ``length_bias/turns`` is 0.5.
    A failed trajectory counts with the turns it had, and not at all if it had none.
    """

    def __init__(self) -> None:
        self._sums = {"played": np.zeros(4), "trained": np.zeros(4)}

    def add_played(self, group: Group) -> None:
        self._add("played", group)

    def add_trained(self, group: Group) -> None:
        self._add("trained", group)

    def metrics(self) -> dict[str, float]:
        """``length_bias/turns|sampled_tokens|seconds``: the mean of all trained trajectories over the mean of all played ones."""
        (played, *of_played), (trained, *of_trained) = self._sums.values()
        names = ("turns", "sampled_tokens", "seconds")
        sums = zip(names, of_trained, of_played, strict=True)
        return {f"length_bias/{name}": float((t / trained) / (p / played)) for name, t, p in sums if t and p}

    def _add(self, kind: str, group: Group) -> None:
        for item in filter(lambda item: item.turns, group):
            seconds = sum(turn.engine_seconds + turn.env_seconds for turn in item.turns)
            self._sums[kind] += (1, len(item.turns), item.num_sampled, seconds)


class IdleTimer:
    """Counts the seconds in which no group is played."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """The idle seconds since the last call."""
        if self._since is not None:
            self.stop()
            self.start()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _staleness(trajectories: Sequence[Trajectory], version: int) -> np.ndarray:
    """For each sampled token, the number of weight updates between its policy version and ``version``."""
    versions = [np.array(turn.policy_versions) for trajectory in trajectories for turn in trajectory.turns]
    return version - np.concatenate(versions) if versions else np.zeros(0)
