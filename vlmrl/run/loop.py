"""The main loop: take a batch of groups, audit, compute advantages, train, and push the weights to the engine.

``build.py`` builds a run's parts and :func:`train` runs it. Evaluation, recording, checkpoints and the warm start have files of their
own, so this file reads like the algorithm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.algos.filters import is_overlong
from vlmrl.checks.image_swap import check_images
from vlmrl.checks.logprob_mismatch import record_trained
from vlmrl.config import Config
from vlmrl.engine.base import paused
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.batches import GroupBatch
from vlmrl.rollout.buffer import AsynchronousBuffer, SynchronousBuffer
from vlmrl.run.build import Run
from vlmrl.run.checkpointing import (
    LoopState,
    restore,
    save_best,
    save_checkpoint,
    save_model,
    save_summary,
)
from vlmrl.run.evaluate import Evaluator
from vlmrl.run.last_save import saved_at_the_end
from vlmrl.run.off_policy import old_policy
from vlmrl.run.recorder import Recorder
from vlmrl.run.sft import fine_tune, stages_of
from vlmrl.run.stages import audited_samples, paused_for_update, push_to_finish
from vlmrl.run.stopping import RunStopped, StopRequest
from vlmrl.run.teaching import teach
from vlmrl.train.controller import RunTrainer
from vlmrl.train.credit import assign_advantages
from vlmrl.train.trainer import TrainerSpec
from vlmrl.types import Trajectory


async def train(
    run: Run, log: RunLog, progress: RunProgress, checkpoint: Path | None = None, stop: StopRequest | None = None
) -> dict[str, float]:
    """Supervised stages, evaluation, training steps, evaluation again. Returns the summary, which is also written to `summary.json`.

    With a ``checkpoint`` the run resumes in its stage, after what comes before.

    Raises:
        RunStopped: ``stop`` was requested. The state of the last finished step is saved.
    """
    config, state, stop = run.config, LoopState.load(checkpoint), stop or StopRequest()
    state.contents = run.contents
    log.trackers.earlier_steps = state.earlier_steps
    evaluator, recorder = Evaluator(run, log, progress, state.summary), Recorder(run, log, progress)
    await stop.interruptible(connect(run, progress))
    if run.teachers is not None:
        run.teachers.scorer.check_stop = stop.check
    if checkpoint is None or state.stage != "train":
        async with saved_at_the_end(run, run.trainer, state, recorder, progress):
            await prepare_training(run, log, progress, evaluator, state, checkpoint, stop)
        checkpoint = None
    if config.train.steps or not stages_of(config):
        async with saved_at_the_end(run, run.trainer, state, recorder, progress):
            async with paused(run.engine):
                buffer, trainer = new_buffer(run), new_trainer(run)
                if checkpoint is None:
                    state.begin("train", buffer.state(), log)
                else:
                    await restore(run, trainer, buffer, state, checkpoint)
            loop = TrainingLoop(run, trainer, buffer, state, evaluator, recorder, progress, stop)
            try:
                await loop.train_steps()
            finally:
                await evaluator.cancel()
                await buffer.close()
            await stop.interruptible(recorder.finish())
            await loop.evaluate_trained()
    # A disk may have room for a checkpoint of adapters, and not for the model.
    async with saved_at_the_end(run, run.trainer, state, recorder, progress):
        save_summary(run, state)
        if config.save_model:
            await save_model(run, run.trainer)
    await recorder.finish()  # again, as the evaluations are on the curve
    return state.summary


async def connect(run: Run, progress: RunProgress) -> None:
    """Start the servers, if there are any, and connect to the teacher's."""
    lines = await run.connect()
    if run.teachers is not None:
        lines += await run.teachers.connect(run.store)
    for line in lines:
        progress.say(line)


async def prepare_training(
    run: Run,
    log: RunLog,
    progress: RunProgress,
    evaluator: Evaluator,
    state: LoopState,
    checkpoint: Path | None,
    stop: StopRequest,
) -> None:
    """The supervised stages from that of ``checkpoint`` on, and the first evaluation; without training steps, one before them, too."""
    stages, alone = stages_of(run.config), not run.config.train.steps
    if alone and stages and checkpoint is None:
        await stop.interruptible(evaluator.evaluate(0, "reward_before"))
    for stage in stages[0 if checkpoint is None else stages.index(state.stage) :]:
        resumed = checkpoint if checkpoint is not None and stage == state.stage else None
        await fine_tune(run, stage, progress, log=log, state=state, checkpoint=resumed, stop=stop)
        state.end_stage(log)
    name = "reward_after" if alone and stages else "reward_before"
    await stop.interruptible(evaluator.evaluate(0, name))
    if alone and stages and run.config.eval.blank_images:
        await stop.interruptible(evaluator.evaluate(0, "reward_blanked", blank_images=True))


@dataclass
class TrainingLoop:
    """The steps of a run after ``state.step``."""

    run: Run
    trainer: RunTrainer
    buffer: SynchronousBuffer
    state: LoopState
    evaluator: Evaluator
    recorder: Recorder
    progress: RunProgress
    stop: StopRequest

    async def train_steps(self) -> None:
        """Train on one batch a step. A stop interrupts rollouts, evaluations and scoring by servers, and no optimizer step."""
        config, state, buffer, warned = self.run.config, self.state, self.buffer, False
        self.recorder.judge_evaluations()
        if not state.evaluated:
            self.evaluator.overdue = True
            await self.evaluate_after(state.step)
        with self.progress.phase("train", config.train.steps, state.step) as phase:
            for step in range(state.step + 1, config.train.steps + 1):
                batch = await self.stop.interruptible(self.recorder.play(step, buffer))
                if step == 1:
                    await self.stop.interruptible(self.check_first_batch(batch))
                metrics = await update(self.run, self.trainer, batch.trajectories, step, self.evaluator, self.stop)
                del batch  # its images are freed before the next batch is played
                buffer.trained()
                if not warned and (warning := small_step_warning(config, step, metrics["groups/trained"])):
                    self.progress.say(warning)
                    warned = True
                try:
                    phase.advance(**await self.recorder.end_step(buffer.metrics() | metrics))
                finally:  # a step that cannot be recorded, such as with a metric that is NaN, is trained, too
                    state.end_step(step, buffer.state(), self.recorder.log, evaluated=not self.evaluator.is_due(step))
                    self.trainer.is_ahead = False
                await self.evaluate_after(step)
                is_last = step == config.train.steps or self.stop.early or self.recorder.is_idle()
                if self.run.checkpoints.is_due(step, is_last):
                    await self.finish_evaluation(step)  # or a resumed run would lack its metrics
                    await save_checkpoint(self.run, self.trainer, state)
                if is_last:
                    break
            await self.finish_evaluation(state.step)

    async def evaluate_after(self, step: int) -> None:
        """Start the evaluation that is due after ``step``, and end it where the weights must stay: in a synchronous run."""
        self.evaluator.after_step(step)
        if not self.run.config.train.max_staleness or self.run.config.checkpoint.keep_best:
            await self.finish_evaluation(step)

    async def finish_evaluation(self, step: int) -> None:
        """Wait for the evaluation that was started after ``step``, if there is one."""
        result = await self.stop.interruptible(self.evaluator.wait())
        if result is not None:
            await save_best(self.run, self.trainer, self.state, step, result.reward)
        self.state.end_step(step, self.buffer.state(), self.recorder.log, evaluated=True)

    async def evaluate_trained(self) -> None:
        """The evaluations after the last step."""
        steps, evaluator = self.state.step, self.evaluator
        result = await self.stop.interruptible(evaluator.evaluate(steps, "reward_after"))
        if result is not None and self.trainer.steps_done:
            await save_best(self.run, self.trainer, self.state, steps, result.reward)
        if self.run.config.eval.blank_images:
            await self.stop.interruptible(evaluator.evaluate(steps, "reward_blanked", blank_images=True))

    async def check_first_batch(self, batch: GroupBatch) -> None:
        """Before the first update: an image that is replaced by noise must change logprobs."""
        run = self.run
        if run.config.train.image_check and run.store is not None:
            trajectories, image_token_id = batch.rollouts.trajectories, run.model.policy.image_token_id
            timeout = run.config.rollout.engine_timeout
            await check_images(self.trainer.score, run.engine, run.store, trajectories, image_token_id, timeout)


async def update(
    run: Run,
    trainer: RunTrainer,
    trajectories: Sequence[Trajectory],
    step: int,
    evaluator: Evaluator,
    stop: StopRequest,
) -> dict[str, Any]:
    """Train on one batch and push the weights to the engine. In an asynchronous run the engine samples during training.

    A running evaluation finishes under the weights it began with. The step is finished without one that fails or that ``stop``
    interrupts, or if a server refuses the weights, and the loop raises why. Raises RunStopped if a stop came before the training.
    """

    def train_batch() -> dict[str, Any]:
        trainer.end_schedule_at(step * run.config.train.steps_per_batch)
        return train_on(run, trainer, trajectories)

    if not run.config.train.max_staleness:
        async with paused_for_update(run.engine, stop):  # it may share the weights that are trained
            metrics = train_batch()
            with run.seconds.of("transfer"):
                return metrics | await push_to_finish(run, trainer, step, evaluator, stop)
    metrics = await asyncio.to_thread(train_batch)
    try:
        await stop.interruptible(evaluator.wait())
    except RunStopped:  # the next interruptible part raises it
        await evaluator.cancel()
    except Exception as error:  # raised when the step is finished
        await evaluator.cancel()
        evaluator.failure = error
    with run.seconds.of("transfer"), suppress(RunStopped):  # the next interruptible part raises it
        async with paused_for_update(run.engine, stop):
            metrics |= await push_to_finish(run, trainer, step, evaluator, stop)
    return metrics


def train_on(run: Run, trainer: RunTrainer, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Train on one batch: emit samples, audit them, compute advantages, update. Returns metrics."""
    algo = run.config.algo
    metrics: dict[str, Any] = {"samples/unmerged": sum(len(trajectory.turns) for trajectory in trajectories)}
    metrics["groups/trained"] = 0
    if not trajectories:
        return metrics | {"samples": 0}
    with run.seconds.of("audit"):
        samples, report = audited_samples(run, trajectories)
        metrics |= teach(run, trainer, samples, trajectories)
    metrics["samples"] = report.samples
    metrics |= {f"left_out/{reason}": count for reason, count in report.left_out.items()}
    kl = trainer.token_kl(samples) if algo.kl_in_reward else None
    metrics |= assign_advantages(samples, trajectories, run.config, kl)
    if algo.mask_truncated:
        overlong = {trajectory.id for trajectory in trajectories if is_overlong(trajectory)}
        metrics["left_out/overlong"] = sum(sum(s.loss_mask) for s in samples if s.trajectory_id in overlong)
        samples = [sample for sample in samples if sample.trajectory_id not in overlong]
    if not samples:
        return metrics
    metrics["groups/trained"] = len({sample.group_id for sample in samples})
    with run.seconds.of("update"):
        output = trainer.step(samples)
    found = record_trained(trajectories, samples, output.logprobs, output.teacher_logprobs)
    return metrics | output.metrics | found


def small_step_warning(config: Config, step: int, groups: int) -> str | None:
    """A warning if one optimizer step was computed from half of its groups or fewer: it moves the weights as far as a full one."""
    wanted = config.train.groups_per_batch // config.train.steps_per_batch
    if not 0 < groups <= wanted / 2:
        return None
    return (
        f"warning: step {step} took an optimizer step from {groups} of {wanted} groups, as the others were left out (algo.filters, "
        "algo.mask_truncated, train.too_old). It moves the weights as far as a full one: set algo.dynamic_sampling filter to sample "
        "more groups. The metric groups/trained counts them; further steps are not reported."
    )


def new_buffer(run: Run) -> SynchronousBuffer:
    config = run.config
    kind = AsynchronousBuffer if config.train.max_staleness else SynchronousBuffer
    return kind(run.runner(), run.stream(run.tasks), run.filters, config.algo, config.train)


def new_trainer(run: Run) -> RunTrainer:
    config, train = run.config, run.config.train
    spec = TrainerSpec(
        algo=replace(config.algo, old_policy=old_policy(config)),
        optim=config.optim,
        total_steps=train.steps * train.steps_per_batch,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        temperature=config.rollout.temperature or 1.0,
        groups_per_step=train.groups_per_step,
        replay_routing=train.replay_routing,
        teacher=replace(config.teacher, sees=None),  # rank 0 alone makes the rows
    )
    return run.trainer.start(spec)
