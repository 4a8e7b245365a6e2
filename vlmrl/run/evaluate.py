"""Held-out evaluation: play tasks, learn nothing, report the mean reward and how sure it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.rollout.runner import Runner
from vlmrl.types import Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """``standard_error`` is over tasks, the mean of a task's samples being one number."""

    reward: float
    standard_error: float
    trajectories: list[Trajectory]
    failed: int


async def evaluate(
    runner: Runner, tasks: Sequence[Task], label: str, on_end: Callable[[Trajectory], None] = lambda trajectory: None
) -> Evaluation:
    """Play each task ``runner.group_size`` times. Tasks that failed are left out and counted."""
    rollouts = await runner.play(iter(tasks), len(tasks), label, on_end)
    means = [sum(t.reward or 0.0 for t in group) / len(group) for group in rollouts.groups]
    if not means:
        raise RuntimeError(f"{label}: none of {len(tasks)} tasks could be played.")
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    return Evaluation(mean, math.sqrt(variance / len(means)), rollouts.trajectories, len(rollouts.failed))


class Background:
    """One evaluation that is played while other things go on."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    def start(self, evaluation: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.create_task(evaluation)

    async def end(self) -> None:
        """Wait until it has ended, if there is one. Raises what it raised."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
