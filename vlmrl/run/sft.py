"""Supervised stages before reinforcement learning: they imitate a scripted function's episodes, or recorded conversations.

Both are one stage: a :class:`Source` gives the samples of each optimizer step, which are trained with cross entropy.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vlmrl.config import Algo, Config, Optim, Rollout
from vlmrl.config.code import load_code
from vlmrl.data import TaskMixture
from vlmrl.engine.base import Request, paused
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.multimodal.masks import RowError
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.failures import list_reasons
from vlmrl.run.build import Run
from vlmrl.run.checkpointing import LoopState, Stage, write_checkpoint
from vlmrl.run.stages import audited_samples, push_weights
from vlmrl.run.stopping import StopRequest
from vlmrl.samples import audit
from vlmrl.samples.conversation import samples_of_conversation
from vlmrl.train.controller import RunTrainer
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Ending, Sample, Task, Trajectory
from vlmrl.utils.users_line import defined_at
from vlmrl.utils.work_pool import DeadlineError, cpu_pool

MOST_SHOWN = 5  # bad rows that a message names
HELD_OUT = "held_out"


class Source:
    """What a supervised stage imitates. Its samples have no held-out ones, no counts and no state, unless a subclass says so."""

    def __init__(self, run: Run, progress: RunProgress, steps: int, optim: Optim) -> None:
        """``steps``: optimizer steps, the first twentieth of which are the warmup."""
        self.steps = steps
        self.optim = replace(optim, warmup_steps=steps // 20)
        self._run, self._say = run, progress.say

    async def take(self, step: int) -> list[Sample]:
        """The samples of optimizer step ``step``, from 1."""
        raise NotImplementedError

    async def held_out(self, part: int) -> list[Sample] | None:
        """Part ``part``, from 0, of the samples to measure the loss on, about as many as of one step; ``None`` after the last one."""
        return None

    def counts(self) -> dict[str, float]:
        """Metrics: counts since the stage began."""
        return {}

    def state(self) -> dict[str, Any]:
        """The position after the last step, for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`."""

    def close(self) -> None:
        """End what reads tasks."""


def stages_of(config: Config) -> list[Stage]:
    """The supervised stages of a run, in order."""
    stages: list[Stage] = []
    if config.warm_start.steps:
        stages.append("warm_start")
    if config.sft.data:
        stages.append("sft")
    return stages


async def fine_tune(
    run: Run,
    stage: Stage,
    progress: RunProgress,
    *,
    log: RunLog | None = None,
    state: LoopState | None = None,
    checkpoint: Path | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Run one supervised stage, and push the trained weights to the engine. With a ``checkpoint`` of the stage it goes on there.

    Raises:
        RunStopped: ``stop`` was requested. ``state`` is that of the last finished step.
        ValueError: too many rows cannot be trained on, or the chat template's responses cannot be found.
    """
    state, stop = state or LoopState(), stop or StopRequest()
    source: Source = Demonstrated(run, progress) if stage == "warm_start" else ConversationSource(run, progress)
    with closing(source):
        async with paused(run.engine):
            spec = TrainerSpec(
                algo=Algo(loss="sft"),
                optim=source.optim,
                total_steps=source.steps,
                tokens_per_micro_batch=run.config.train.tokens_per_micro_batch,
            )
            trainer = run.trainer.start(spec)
            if checkpoint is None:
                state.begin(stage, source.state(), log)
            else:
                state.restore(trainer, checkpoint)
                source.restore(state.batches)
            await _train(run, source, trainer, progress, log, state, stop)
            trainer.close()
            await push_weights(run, trainer, run.engine.policy_version)


async def _train(
    run: Run,
    source: Source,
    trainer: RunTrainer,
    progress: RunProgress,
    log: RunLog | None,
    state: LoopState,
    stop: StopRequest,
) -> None:
    """The steps of a stage after ``state.step``. A stop interrupts what is read or played, and no update."""
    evaluate = run.config.eval.every
    is_due = not state.step or not state.evaluated
    if is_due and log is not None and (loss := await _held_out_loss(source, trainer, stop)) is not None:
        log.log(state.step, {"sft/held_out_loss": loss})
    with progress.phase(state.stage.replace("_", " "), source.steps, state.step) as phase:
        for step in range(state.step + 1, source.steps + 1):
            began = time.perf_counter()
            samples = await stop.interruptible(source.take(step))
            read = time.perf_counter()
            metrics: dict[str, float] = {}
            if samples:  # none if rollout.max_failed_fraction is 1 and all of them failed
                trainer.end_schedule_at(step)
                metrics = {f"sft/{name}": value for name, value in trainer.step(samples).metrics.items()}
            del samples  # its images are freed before the next ones are read
            metrics |= {**source.counts(), "time/sft_data": read - began, "time/sft_update": time.perf_counter() - read}
            loss, failure = None, None
            if log is not None and (step == source.steps or (evaluate and step % evaluate == 0)):
                try:
                    loss = await _held_out_loss(source, trainer, stop)
                except Exception as error:  # a stop, or rows that are gone: raised when the trained step is finished
                    failure = error
                metrics |= {} if loss is None else {"sft/held_out_loss": loss}
            try:
                if log is not None:
                    log.log(step, metrics)
                phase.advance(loss=metrics.get("sft/loss"), held_out=loss)
            finally:  # a step that cannot be recorded is trained, too
                state.end_step(step, source.state(), log, evaluated=failure is None)
                trainer.is_ahead = False
            if failure is not None:
                raise failure
            if log is not None and run.checkpoints.is_due(step, step == source.steps):
                await asyncio.to_thread(write_checkpoint, run, trainer, state)


async def _held_out_loss(source: Source, trainer: RunTrainer, stop: StopRequest) -> float | None:
    """The mean negative logprob, in nats, over the trained tokens of the held-out samples. None: there are none."""
    total, tokens, parts = 0.0, 0, itertools.count()
    while (samples := await stop.interruptible(source.held_out(next(parts)))) is not None:
        for sample, logprobs in zip(samples, trainer.score(samples) if samples else (), strict=True):
            total -= float(np.dot(logprobs, sample.loss_mask))
            tokens += sum(sample.loss_mask)
    return total / tokens if tokens else None


class Demonstrations:
    """The responses that ``demonstrate(task, turn)`` gives. An agent's turns are its requests, in all branches of the trajectory.

    After ``begin({"warm000000/00000/00": task})``, the second request of that trajectory is answered with ``demonstrate(task, 1)``.
    """

    def __init__(self, demonstrate: Callable[[Task, int], str]) -> None:
        self._demonstrate = demonstrate
        self._tasks: dict[str, Task] = {}
        self._turns = Counter[str]()

    def begin(self, tasks: dict[str, Task]) -> None:
        """``tasks``, by the ids of their trajectories, are played from now on."""
        self._tasks = tasks
        self._turns.clear()

    def response(self, request: Request, _: int) -> str:
        trajectory_id = request.trajectory_id.partition("~")[0]  # an agent's branches have suffixes
        turn = self._turns[trajectory_id]
        self._turns[trajectory_id] += 1
        task = self._tasks[trajectory_id.partition(".")[0]]  # and so have refills
        text = self._demonstrate(task, turn)
        if not isinstance(text, str):
            call = f"warm_start.demonstrate(task {task.id!r}, turn {turn})"
            where = defined_at(self._demonstrate)
            raise ValueError(f"{call} must return the text of a response, but it returned {text!r:.200}{where}.")
        return text


BUDGETS: dict[Ending | None, str] = {
    "length": "max_response_tokens",
    "max_turns": "max_turns",
    "max_tokens": "max_tokens",
}
"""By ending, the setting of ``rollout`` that ended the episode."""

NEVER_DONE = ", or let step() return True for done at its last turn"


def describe_cuts(trajectories: Sequence[Trajectory], rollout: Rollout) -> list[str]:
    """A line for each budget that ended demonstrated episodes, which are imitated as they are."""
    counts = Counter(BUDGETS[each.ending] for each in trajectories if each.ending in BUDGETS)
    return [
        f"{count} of {len(trajectories)} demonstrated episodes were ended by rollout.{name} ({getattr(rollout, name)}), "
        f"not by the env: raise it{NEVER_DONE if name == 'max_turns' else ''}, unless that is meant."
        for name, count in counts.items()
    ]


class Demonstrated(Source):
    """Episodes of the run's tasks, which its own env or agent plays with scripted responses."""

    def __init__(self, run: Run, progress: RunProgress) -> None:
        config = run.config.warm_start
        super().__init__(run, progress, config.steps, Optim(lr=config.lr, offload=run.config.optim.offload))
        self._demonstrations = Demonstrations(load_code("warm_start.demonstrate", config.demonstrate))
        engine = ScriptedEngine(self._demonstrations.response, run.model.renderer)
        self._runner = run.runner(group_size=1, engine=engine)
        self._tasks = run.stream(run.tasks)
        self._failed = 0
        self._rewards: list[float] = []

    async def take(self, step: int) -> list[Sample]:
        label = f"warm{step - 1:06d}"
        batch = await self._tasks.take(self._run.config.warm_start.trajectories_per_step)
        played = [draw.task for draw in batch if draw.error is None]
        self._demonstrations.begin({f"{label}/{index:05d}/00": task for index, task in enumerate(played)})
        rollouts = await self._runner.play(iter(batch), len(batch), label)
        if rollouts.failed:
            self._failed += len(rollouts.failed)
            self._say(f"warm start {step}: {len(rollouts.failed)} failed:\n{list_reasons(rollouts.failed)}")
        if step == 1:
            for line in describe_cuts(rollouts.trajectories, self._run.config.rollout):
                self._say(f"warm start: {line}")
        self._rewards = [each.reward for each in rollouts.trajectories if each.reward is not None]
        samples = audited_samples(self._run, rollouts.trajectories)[0] if rollouts.trajectories else []
        for sample in samples:
            sample.advantage = 0.0  # the trainer requires one, cross entropy does not use it
        return samples

    def counts(self) -> dict[str, float]:
        counts = {"sft/failed": float(self._failed)}
        return counts | ({"sft/reward": fmean(self._rewards)} if self._rewards else {})

    def state(self) -> dict[str, Any]:
        return {"tasks": self._tasks.state(), "failed": self._failed}

    def restore(self, state: dict[str, Any]) -> None:
        self._tasks.restore(state["tasks"])
        self._failed = state["failed"]

    def close(self) -> None:
        self._tasks.close()


def step_draws(rows: TaskMixture, rows_per_step: int) -> list[range]:
    """The draws of each step of fine-tuning: each row as often as its dataset has epochs, at most ``rows_per_step`` a step.

    The steps have about as many: 9 rows, 4 a step, are 3, 3 and 3, since a last row alone would move the weights as far as 4 do.
    """
    total = math.ceil(sum(rows.weights.values()))
    count = math.ceil(total / rows_per_step)
    edges = [number * total // count for number in range(count + 1)]
    return list(itertools.starmap(range, itertools.pairwise(edges)))


class ConversationSource(Source):
    """The conversations of `sft.data`, mixed, epoch after epoch. Bad rows are counted by reason and left out."""

    def __init__(self, run: Run, progress: RunProgress) -> None:
        assert run.conversations is not None
        self._rows, self._held_out = run.conversations
        self._bad = Counter[str]()
        self._said = set[str]()
        config = run.config
        self._draws = step_draws(self._rows, config.sft.rows_per_step)
        super().__init__(run, progress, len(self._draws), replace(config.optim, lr=config.sft.lr))

    async def take(self, step: int) -> list[Sample]:
        draws = [partial(self._rows.draw, number) for number in self._draws[step - 1]]
        return await self._samples(f"sft{step:06d}", draws)

    async def held_out(self, part: int) -> list[Sample] | None:
        rows, size = self._held_out, self._run.config.sft.rows_per_step
        total = 0 if rows is None else len(rows)
        parts = math.ceil(total / size)
        if rows is None or part >= parts:
            return None
        # Equal parts: one bad row in a last part of one would be all of its rows, and end the run.
        numbers = range(part * total // parts, (part + 1) * total // parts)
        return await self._samples(HELD_OUT, [partial(rows.__getitem__, number) for number in numbers])

    def counts(self) -> dict[str, float]:
        return {f"sft/bad_rows/{reason}": float(count) for reason, count in self._bad.items()}

    def state(self) -> dict[str, Any]:
        return {"bad_rows": dict(self._bad)}

    def restore(self, state: dict[str, Any]) -> None:
        self._bad = Counter(state["bad_rows"])

    async def _samples(self, label: str, draws: Sequence[Callable[[], Task]]) -> list[Sample]:
        """The samples of these draws. Raises ValueError if more than `rollout.max_failed_fraction` of them are bad rows."""
        made = await asyncio.gather(*(self._made(f"{label}/{index:05d}", draw) for index, draw in enumerate(draws)))
        bad = [each for each in made if isinstance(each, RowError)]
        if label != HELD_OUT:
            self._bad.update(error.reason for error in bad)
        if bad:
            lines = [
                f"{label}: {len(bad)} of {len(draws)} rows are left out ({_reasons(bad)}):",
                *map(str, bad[:MOST_SHOWN]),
            ]
            limit = self._run.config.rollout.max_failed_fraction
            if len(bad) > limit * len(draws):
                rule = f"That is more than rollout.max_failed_fraction ({limit:g}) allows. `vlmrl data check` lists all of them."
                raise ValueError("\n".join([*lines, rule]))
            if not self._said.issuperset(map(str, bad)):  # they come again in each epoch
                self._say("\n".join(lines))
            self._said.update(map(str, bad))
        samples = [sample for each in made if not isinstance(each, RowError) for sample in each]
        policy = self._run.model.policy
        if samples:
            audit(samples, image_token_id=policy.image_token_id, banned_ids=policy.banned_ids)
        return samples

    async def _made(self, name: str, draw: Callable[[], Task]) -> list[Sample] | RowError:
        config, model = self._run.config.rollout, self._run.model
        limits: dict[str, Any] = {"max_tokens": config.max_tokens, "seconds": config.env_timeout}
        try:
            task = await cpu_pool().run(config.env_timeout, draw)
            return await samples_of_conversation(task, model.renderer, self._run.store, name=name, **limits)
        except DeadlineError as error:
            return RowError("timeout", f"{name}: a row was not read in time: {error}")
        except RowError as error:
            return error


def _reasons(bad: Sequence[RowError]) -> str:
    """``3 images, 1 too_long``."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(error.reason for error in bad).most_common())
