"""Held-out evaluation: play tasks without training, and report the mean reward and its standard error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.runner import Runner
from vlmrl.run.build import Run
from vlmrl.types import Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """``standard_error`` is over tasks; the mean of a task's samples counts as one observation."""

    reward: float
    standard_error: float
    trajectories: list[Trajectory]
    failed: int


class Evaluator:
    """Evaluates the held-out tasks of a run, if there are any, and logs the results; named ones also go to ``summary``."""

    def __init__(self, run: Run, log: RunLog, progress: RunProgress, summary: dict[str, float]) -> None:
        self._run = run
        self._log = log
        self._progress = progress
        self._summary = summary
        self._background: asyncio.Task[None] | None = None

    async def evaluate(self, step: int, name: str | None = None, blank_images: bool = False) -> None:
        """Evaluate under the current weights. With a ``name`` the reward goes to the summary under it."""
        if self._run.held_out is None:
            return
        kind = "blanked" if blank_images else "eval"
        result = await evaluate_run(self._run, self._progress, label=f"{kind}{step:06d}", blank_images=blank_images)
        row = {f"{kind}/{key}": value for key, value in trajectory_metrics(result.trajectories).items()}
        self._log.log(step, row | {f"{kind}/standard_error": result.standard_error})
        if name is not None:
            self._summary[name] = result.reward
            self._summary[f"{name}_standard_error"] = result.standard_error

    async def after_step(self, step: int) -> None:
        """Start the evaluation that is due after this step. In an asynchronous run it continues in the background."""
        config = self._run.config
        if config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
            self._background = asyncio.create_task(self.evaluate(step))
            if not config.train.max_staleness:
                await self.wait()

    async def wait(self) -> None:
        """Wait for the evaluation in the background, if there is one. Raises its error."""
        task, self._background = self._background, None
        if task is not None:
            await task

    async def cancel(self) -> None:
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)


async def evaluate_run(run: Run, progress: RunProgress, *, label: str, blank_images: bool = False) -> Evaluation:
    """Evaluate the held-out tasks of a run under its current weights."""
    if run.held_out is None:
        raise ValueError("eval.data must be set for an evaluation.")
    config = run.config
    store = run.model.new_store(blank_images)
    rollout = replace(config.rollout, temperature=config.eval.temperature)
    runner = run.runner(group_size=config.eval.samples_per_task, store=store, rollout=rollout)
    tasks = [task for task in run.held_out if run.held_out.fits(task)]
    rewards: list[float] = []
    with progress.phase("evaluate", len(tasks) * runner.group_size) as phase:

        def ended(trajectory: Trajectory) -> None:
            rewards.extend([] if trajectory.reward is None else [trajectory.reward])
            phase.advance(reward=sum(rewards) / len(rewards) if rewards else None)

        try:
            return await evaluate(runner, tasks, label, ended)
        finally:
            if store is not None:
                store.close()


async def evaluate(
    runner: Runner, tasks: Sequence[Task], label: str, on_end: Callable[[Trajectory], None] = lambda trajectory: None
) -> Evaluation:
    """Play each task ``runner.group_size`` times. Failed tasks are counted and do not enter the mean."""
    rollouts = await runner.play(iter(tasks), len(tasks), label, on_end)
    means = [sum(t.reward or 0.0 for t in group) / len(group) for group in rollouts.groups]
    if not means:
        raise RuntimeError(f"{label}: none of {len(tasks)} tasks could be played.")
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    return Evaluation(mean, math.sqrt(variance / len(means)), rollouts.trajectories, len(rollouts.failed))
