"""Held-out evaluation: play tasks without training, and report the mean reward, its standard error and pass@k."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from vlmrl.config import Config
from vlmrl.data import Draw
from vlmrl.report.estimators import ks_up_to, pass_at_k
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.progress import RunProgress
from vlmrl.report.records import Kind
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.failures import list_reasons
from vlmrl.rollout.runner import Group, RolloutError, Rollouts
from vlmrl.run.build import Run
from vlmrl.run.playing import Playing
from vlmrl.run.recorder import trajectory_log
from vlmrl.types import Trajectory


@dataclass(frozen=True)
class LeftOut:
    """How many tasks are not in the mean reward of an evaluation, by reason."""

    too_long: int = 0
    """Their prompts exceed ``data.max_prompt_tokens``."""
    bad_rows: int = 0
    """Their rows cannot be played: they cannot be read, or an image of the prompt does not load."""
    rejected: int = 0
    """Their envs raised RetryTurn until no retry was left. Greedy decoding samples the same response at each try."""
    failed: int = 0
    """Their envs or the engine failed."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        reasons = {
            "prompt too long": self.too_long,
            "bad rows": self.bad_rows,
            "rejected with RetryTurn": self.rejected,
            "failed": self.failed,
        }
        return f"{self.total} left out ({', '.join(f'{n} {reason}' for reason, n in reasons.items() if n)})"


@dataclass(frozen=True)
class TaskRewards:
    """The rewards of one task's trajectories: ``TaskRewards("geo/3", "geo", [1.0, 0.0])``."""

    id: str
    """The task's id. If several held-out tasks have it, ``#2`` and so on follow it, also where some of them are left out."""
    source: str
    rewards: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.rewards)

    def pass_at(self, k: int, solved: float) -> float:
        """pass@k of this task: a trajectory is solved if its reward is at least ``solved``."""
        return pass_at_k(len(self.rewards), sum(reward >= solved for reward in self.rewards), k)


@dataclass(frozen=True)
class Evaluation:
    """Rewards by task, and what is not in them. The mean of a task's samples counts as one observation."""

    tasks: list[TaskRewards]
    solved: float
    """The reward from which a trajectory is solved: ``eval.solved``."""
    left_out: LeftOut
    trajectories: list[Trajectory]
    """Of the tasks whose trajectories all ended without failure."""
    failed: Sequence[Trajectory] = ()
    """Those that failed, played again or not."""

    @property
    def reward(self) -> float:
        """The mean over tasks."""
        return fmean(task.mean for task in self.tasks)

    @property
    def standard_error(self) -> float:
        """Of the mean, over tasks."""
        mean, count = self.reward, len(self.tasks)
        variance = sum((task.mean - mean) ** 2 for task in self.tasks) / max(1, count - 1)
        return math.sqrt(variance / count)

    @property
    def ks(self) -> list[int]:
        """The k of pass@k: 1, 2, 4 and so on, as far as the samples of a task go."""
        return ks_up_to(len(self.tasks[0].rewards))

    def metrics(self) -> dict[str, float]:
        """``tasks``, ``tasks_left_out[/<reason>]``, ``standard_error``, ``pass@<k>``, and the metrics of the trajectories."""
        left_out = {f"tasks_left_out/{reason}": float(count) for reason, count in vars(self.left_out).items()}
        counts = {"tasks": float(len(self.tasks)), "tasks_left_out": float(self.left_out.total), **left_out}
        passed = {f"pass@{k}": fmean(task.pass_at(k, self.solved) for task in self.tasks) for k in self.ks}
        metrics = trajectory_metrics([*self.trajectories, *self.failed])
        return metrics | counts | {"standard_error": self.standard_error} | passed


class Evaluator:
    """Evaluates the held-out tasks of a run, if there are any, and logs the results; named ones also go to ``summary``."""

    def __init__(self, run: Run, log: RunLog, progress: RunProgress, summary: dict[str, float]) -> None:
        self._run = run
        self._log = log
        self._progress = progress
        self._trajectories = trajectory_log(run, log)
        self._summary = summary
        self._background: asyncio.Task[Evaluation | None] | None = None
        self.overdue = False
        """Whether one was dropped, by a stop or an error: the next finished step is evaluated in its place."""
        self.failure: Exception | None = None
        """The error of an evaluation that failed while a step was trained, or of that step's weight update, for :meth:`after_step`."""

    async def evaluate(self, step: int, name: str | None = None, blank_images: bool = False) -> Evaluation | None:
        """Evaluate under the current weights. With a ``name`` the reward goes to the summary under it. None: no tasks are held out."""
        if self._run.held_out is None:
            return None
        kind: Kind = "blanked" if blank_images else "eval"
        label = f"{kind}{step:06d}"
        began = time.perf_counter()
        try:
            result = await evaluate_run(self._run, self._progress, label=label, blank_images=blank_images)
        except RolloutError as error:
            await self._trajectories.write(step, kind, [], error.failed)
            raise
        seconds = time.perf_counter() - began
        await self._trajectories.write(step, kind, result.trajectories, result.failed)
        metrics = {f"{kind}/{key}": value for key, value in result.metrics().items()}
        self._log.log(step, metrics | {"time/evaluation": seconds})
        if name is not None:
            self._summary[name] = result.reward
            self._summary[f"{name}_standard_error"] = result.standard_error
            self._summary[f"{name}_tasks_left_out"] = float(result.left_out.total)
            self._summary |= {f"{name}_pass@{k}": metrics[f"{kind}/pass@{k}"] for k in result.ks[1:]}
            for part in self._run.config.mixture:
                if (mean := metrics.get(f"{kind}/source/{part}/reward/mean")) is not None:
                    self._summary[f"{name}/{part}"] = mean
        return result

    def is_due(self, step: int) -> bool:
        """Whether an evaluation is due after this step, which is not the last one."""
        config = self._run.config
        return config.eval.every > 0 and step < config.train.steps and (self.overdue or step % config.eval.every == 0)

    def after_step(self, step: int) -> None:
        """Start the evaluation that is due after this step, in the background. Raises :attr:`failure`, if there is one."""
        if self.failure is not None:
            raise self.failure
        if self.is_due(step):
            self._background, self.overdue = asyncio.create_task(self.evaluate(step)), False

    async def wait(self) -> Evaluation | None:
        """The result of the evaluation in the background, if there is one. Raises its error."""
        if self._background is None:
            return None
        result, self._background = await self._background, None
        return result

    async def cancel(self) -> None:
        """Drop the evaluation in the background, if there is one."""
        if self._background is not None:
            self._background.cancel()
            [result] = await asyncio.gather(self._background, return_exceptions=True)
            self._background, self.overdue = None, isinstance(result, BaseException)  # else it had ended already


async def evaluate_run(run: Playing, progress: RunProgress, *, label: str, blank_images: bool = False) -> Evaluation:
    """Evaluate the held-out tasks of a run, under its current weights if it has any. Prints the tasks that are not in the mean."""
    assert run.held_out is not None
    config = run.config
    store = run.model.new_store(None if run.store is None else run.store.memory, blank_images)
    rollout = replace(config.rollout, temperature=config.eval.temperature)
    runner = run.runner(group_size=config.eval.samples_per_task, store=store, rollout=rollout)
    stream = run.stream(run.held_out, store=store, once=True)
    rewards: list[float] = []
    failed = 0
    try:
        draws = await stream.take(len(run.held_out))
        with progress.phase("evaluate", len(draws) * runner.group_size) as phase:

            def ended(trajectory: Trajectory) -> None:
                nonlocal failed
                failed += trajectory.failed
                rewards.extend([] if trajectory.reward is None else [trajectory.reward])
                phase.advance(reward=sum(rewards) / len(rewards) if rewards else None, failed=failed or None)

            rollouts = await runner.play(iter(draws), len(draws), label, ended)
    except RolloutError as error:
        raise RolloutError(f"evaluation {label}: {error}", error.failed) from error
    finally:
        stream.close()
    if rollouts.failed:
        progress.say(f"{label}: {len(rollouts.failed)} trajectories failed:\n{list_reasons(rollouts.failed)}")
    names = _distinct_names(draws, stream.skipped)
    result = summarize_rollouts(rollouts, label, stream.too_long, config.eval.solved, names)
    if result.left_out.total:
        progress.say(f"{label}: the mean reward is over {len(result.tasks)} tasks, {result.left_out}")
    return result


def require_held_out(config: Config) -> None:
    """Raises ValueError unless the config has held-out tasks."""
    parts = config.mixture.values()
    if any(part.eval_data.is_set or part.data.held_out for part in parts) or config.eval.data.is_set:
        return
    if not config.data.held_out:
        raise ValueError(
            "there are no held-out tasks to evaluate on: hold out training rows with --data.held-out 64, or name others "
            "with --eval.data.path, or with --eval.data.generator and --eval.data.size (in a mixture: --mixture.NAME.eval-data...)."
        )


def summarize_rollouts(
    rollouts: Rollouts, label: str, too_long: int = 0, solved: float = 1.0, names: Mapping[int, str] | None = None
) -> Evaluation:
    """The rewards of the tasks whose groups are complete. The others are counted, and do not enter the mean.

    ``names``: those of the tasks by :func:`id`, where they are not their ids.

    Raises RolloutError if there are none.
    """
    bad_rows, rejected = len(rollouts.bad_rows), rollouts.rejected_groups
    left_out = LeftOut(too_long, bad_rows, rejected, rollouts.dropped_groups - bad_rows - rejected)
    if not rollouts.groups:
        raise RolloutError(
            f"{label}: there is no mean reward, since no task was played to its end: {left_out}.", rollouts.failed
        )
    tasks = [_task_rewards(group, names or {}) for group in rollouts.groups]
    return Evaluation(tasks, solved, left_out, rollouts.trajectories, failed=rollouts.failed)


def _task_rewards(group: Group, names: Mapping[int, str]) -> TaskRewards:
    task = group[0].task
    return TaskRewards(names.get(id(task), task.id), task.source, [member.reward or 0.0 for member in group])


def _distinct_names(draws: Sequence[Draw], skipped: Mapping[int, str]) -> dict[int, str]:
    """The names of tasks by :func:`id`. They are counted over all tasks, those with a too long prompt (``skipped``: their ids by draw)
    included, since models are compared by task, and leave out others."""
    ids = {draw.number: draw.task.id for draw in draws} | dict(skipped)
    seen: Counter[str] = Counter()
    names = {}
    for number in sorted(ids):
        seen[name := ids[number]] += 1
        names[number] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return {id(draw.task): names[draw.number] for draw in draws}
