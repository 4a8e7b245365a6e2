"""The main loop: roll out groups, audit, train, hand the new weights to the engine.

`parts.py` makes a run's parts from its config and :func:`train` plays it; the command line calls both. Each stage is a
function or an object of its own, so this file reads like the algorithm.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vlmrl.algos.filters import is_overlong
from vlmrl.checks.image_swap import check_images
from vlmrl.checks.logprob_mismatch import TurnMismatch, summarise, turn_mismatches
from vlmrl.config import Algo, Optim
from vlmrl.config.code import load_code
from vlmrl.data import TaskStream
from vlmrl.engine.base import Request, paused
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.model.lora import save_adapters
from vlmrl.report.curve import draw_curve
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.report.viewer import write_page
from vlmrl.rollout.batches import GroupBatch
from vlmrl.rollout.buffer import AsynchronousBuffer, RolloutBuffer, SynchronousBuffer
from vlmrl.run.build import Run
from vlmrl.run.evaluate import Background, Evaluation, evaluate
from vlmrl.samples import AuditReport, audit, emit
from vlmrl.train.checkpoint import load_json, save_json
from vlmrl.train.credit import give_advantages
from vlmrl.train.factory import RunTrainer
from vlmrl.types import Sample, Task, Trajectory

LAST_PAUSE = 150.0  # seconds for the engine of a broken run to leave the GPUs to the trainer
PAGE_TRAJECTORIES = 64  # of the last batch, shown on the trajectory page


@dataclass
class LoopState:
    """Where a run is: what a checkpoint holds of the loop itself."""

    step: int = 0
    batches: dict[str, Any] = field(default_factory=dict)
    log: dict[str, int] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)


async def train(run: Run, log: RunLog, progress: RunProgress, checkpoint: Path | None = None) -> dict[str, float]:
    """Warm start, evaluation, the steps, evaluation again. Returns the summary, which `summary.json` holds too.

    A ``checkpoint`` stands for all that went before it.
    """
    config, place = run.config, LoopState()
    for line in await run.connect():
        progress.say(line)
    if checkpoint is None:
        if config.warm_start.steps:
            await warm_start(run, progress)
        await _evaluate_into(place.summary, "reward_before", run, log, 0, progress)
    async with paused(run.engine):
        trainer, batches = new_trainer(run), new_buffer(run)
        if checkpoint is not None:
            place = await restore(run, trainer, batches, checkpoint)
    evaluation = Background()
    played: list[Trajectory] = []
    try:
        with progress.phase("train", config.train.steps - place.step) as phase:
            for step in range(place.step + 1, config.train.steps + 1):
                counts = image_counts(run)
                began = time.perf_counter()
                batch = await batches.take(step)
                rolled_out = time.perf_counter()
                played = batch.rollouts.trajectories
                if step == 1 and config.train.canary and run.store is not None:
                    await check_images(trainer.score, run.engine, run.store, played, run.model.policy.image_token_id)
                metrics = await update(run, trainer, batch.trajectories, step, evaluation)
                batches.trained()
                seconds = {"time/rollout": rolled_out - began, "time/train": time.perf_counter() - rolled_out}
                counts = {name: count - counts[name] for name, count in image_counts(run).items()}
                row = step_metrics(batch) | counts | batches.metrics() | metrics | seconds
                log.log(step, row)
                log.log_trajectories(step, played)
                rate = row["sampled_tokens"] / (time.perf_counter() - began)
                phase.advance(reward=row.get("reward/mean"), reply_tokens=row["sampled_tokens/mean"], tokens_per_s=rate)
                if config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
                    evaluation.start(_evaluate_into({}, "", run, log, step, progress))
                    if not config.train.max_staleness:
                        await evaluation.end()
                if config.checkpoint.every and (step % config.checkpoint.every == 0 or step == config.train.steps):
                    await evaluation.end()  # or its numbers would be missing after a resume
                    place = replace(place, step=step, batches=batches.state(), log=log.sizes())
                    async with paused(run.engine) if config.colocated else nullcontext():
                        await asyncio.to_thread(save_checkpoint, run, trainer, place)
            await evaluation.end()
    except BaseException:
        if config.save_model and trainer.steps_done:
            await save_what_there_is(run, trainer, progress)
        raise
    finally:
        await evaluation.stop()
        await batches.close()
        leave_behind(run, log, played)
    summary = place.summary
    await _evaluate_into(summary, "reward_after", run, log, config.train.steps, progress)
    if config.eval.blank_images:
        await _evaluate_into(summary, "reward_blanked", run, log, config.train.steps, progress, blank_images=True)
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    leave_behind(run, log, played)
    if config.save_model:
        if config.colocated:
            await run.engine.pause()
        save(run, trainer)
    return summary


def save_checkpoint(run: Run, trainer: RunTrainer, place: LoopState) -> None:
    with run.checkpoints.new(place.step) as folder:
        trainer.save(folder)
        save_json(folder, asdict(place))


async def restore(run: Run, trainer: RunTrainer, batches: RolloutBuffer, checkpoint: Path) -> LoopState:
    """Bring trainer, paused engine and data to where the checkpoint was made."""
    place = LoopState(**load_json(checkpoint))
    trainer.restore(checkpoint)
    await push_weights(run, trainer, place.step)
    batches.restore(place.batches)
    return place


async def save_what_there_is(run: Run, trainer: RunTrainer, progress: RunProgress) -> None:
    """A stopped or broken run keeps what it has learnt: the weights here, which need nothing of other ranks, or else the trainer's."""
    try:
        if run.config.colocated:
            async with asyncio.timeout(LAST_PAUSE):
                await run.engine.pause()
    except Exception as error:  # what broke the run may be the engine
        progress.say(f"the engine did not leave the GPUs to the trainer: {error or type(error).__name__}")
    try:
        run.model.save(run.folder / "model", trainer.named_weights() if run.model.is_on_meta else None)
    except RuntimeError as error:  # what broke the run may be the trainer
        progress.say(f"the weights of the last step could not be saved: {error}")


def save(run: Run, trainer: RunTrainer) -> None:
    """The trained weights in Hugging Face form, and adapters, if there are any, also by themselves."""
    run.model.save(run.folder / "model", trainer.named_weights() if run.model.is_on_meta else None)
    model = run.config.model
    if model.lora.rank:
        save_adapters(dict(trainer.named_adapters()), model.lora, model.path, run.folder / "adapters")


async def update(
    run: Run, trainer: RunTrainer, trajectories: Sequence[Trajectory], step: int, evaluation: Background
) -> dict[str, Any]:
    """Train on one batch and hand the weights to the engine, which samples on meanwhile where it has weights of its own.

    An ``evaluation`` that is under way ends with the weights it began with.
    """
    if not run.config.train.max_staleness:
        async with paused(run.engine):  # it may sample from the very weights that are trained
            metrics = train_on(run, trainer, trajectories)
            return metrics | await push_weights(run, trainer, step)
    metrics = await asyncio.to_thread(train_on, run, trainer, trajectories)
    await evaluation.end()
    began = time.perf_counter()
    async with paused(run.engine):
        metrics |= await push_weights(run, trainer, step)
    return metrics | {"time/weights": time.perf_counter() - began}


def train_on(run: Run, trainer: RunTrainer, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """One batch: emit, audit, give the advantages, update."""
    began = time.perf_counter()
    metrics: dict[str, Any] = {"samples/unmerged": sum(len(trajectory.turns) for trajectory in trajectories)}
    if not trajectories:
        return metrics | {"samples": 0}
    samples, report = audited_samples(run, trajectories)
    metrics |= {"time/audit": time.perf_counter() - began, "samples": report.samples}
    metrics |= {f"left_out/{reason}": count for reason, count in report.left_out.items()}
    penalties = trainer.kl_by_trajectory(samples) if run.config.algo.kl_in_reward else {}
    coef = run.config.algo.kl_coef
    give_advantages(samples, trajectories, run.config, {name: coef * kl for name, kl in penalties.items()})
    if run.config.algo.mask_truncated:
        overlong = {trajectory.id for trajectory in trajectories if is_overlong(trajectory)}
        metrics["left_out/overlong"] = sum(sum(s.loss_mask) for s in samples if s.trajectory_id in overlong)
        samples = [sample for sample in samples if sample.trajectory_id not in overlong]
    if samples:
        metrics |= trainer.step(samples)
    return metrics | note_mismatches(trajectories, turn_mismatches(trajectories, samples, trainer.scored))


def audited_samples(run: Run, trajectories: Sequence[Trajectory]) -> tuple[list[Sample], AuditReport]:
    """The rows that these trajectories are trained by."""
    samples = [sample for trajectory in trajectories for sample in emit(trajectory, run.config.rollout.samples)]
    policy = run.model.policy
    image_token_id, banned_ids, routing = policy.image_token_id, policy.banned_ids, policy.routing
    return samples, audit(samples, trajectories, image_token_id=image_token_id, banned_ids=banned_ids, routing=routing)


def note_mismatches(trajectories: Sequence[Trajectory], gaps: Sequence[TurnMismatch]) -> dict[str, float | str]:
    """Write each turn's gap between trainer and rollout into the turn; the summary of all of them."""
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    for gap in gaps:
        by_id[gap.trajectory_id].turns[gap.turn].logprob_mismatch = gap.max
    return summarise(gaps)


async def warm_start(run: Run, progress: RunProgress) -> None:
    """Imitate scripted episodes, played through the same loop, with cross entropy on the scripted replies."""
    config = run.config.warm_start
    demonstrate = load_code("warm_start.demonstrate", config.demonstrate)
    playing: dict[str, Task] = {}

    def reply(request: Request, turn: int) -> str:
        assert demonstrate is not None
        return demonstrate(playing[request.trajectory_id.partition(".")[0]], turn)  # a refill's id has a suffix

    runner = run.runner(group_size=1, engine=ScriptedEngine(reply, run.model.renderer))
    tasks = TaskStream(run.tasks)
    async with paused(run.engine):
        trainer = run.trainers.start(
            Algo(loss="sft"),
            optim=Optim(lr=config.lr, warmup_steps=config.steps // 20),
            total_steps=config.steps,
            tokens_per_micro_batch=run.config.train.tokens_per_micro_batch,
        )
        with progress.phase("warm start", config.steps) as phase:
            for step in range(config.steps):
                batch = [next(tasks) for _ in range(config.trajectories_per_step)]
                playing = {f"warm{step:06d}/{index:05d}/00": task for index, task in enumerate(batch)}
                rollouts = await runner.play(iter(batch), len(batch), f"warm{step:06d}")
                samples, _ = audited_samples(run, rollouts.trajectories)
                for sample in samples:
                    sample.advantage = 0.0  # cross entropy asks for none
                phase.advance(loss=trainer.step(samples)["loss"])
        trainer.close()
        await push_weights(run, trainer, run.engine.policy_version)


async def evaluate_run(run: Run, progress: RunProgress, *, label: str, blank_images: bool = False) -> Evaluation:
    """The held-out tasks under the run's current weights."""
    if run.held_out is None:
        raise ValueError("eval.data must be set for an evaluation.")
    config = run.config
    rollout = replace(config.rollout, temperature=config.eval.temperature)
    store = run.model.new_store(blank_images)
    runner = run.runner(group_size=config.eval.samples_per_task, store=store)
    runner.loop.config = rollout
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


async def _evaluate_into(
    summary: dict[str, float],
    name: str,
    run: Run,
    log: RunLog,
    step: int,
    progress: RunProgress,
    blank_images: bool = False,
) -> dict[str, float]:
    """Evaluate if there is anything held out; log the numbers, and put them into the summary under ``name``."""
    if run.held_out is None:
        return summary
    kind = "blanked" if blank_images else "eval"
    result = await evaluate_run(run, progress, label=f"{kind}{step:06d}", blank_images=blank_images)
    row = {f"{kind}/{key}": value for key, value in trajectory_metrics(result.trajectories).items()}
    log.log(step, row | {f"{kind}/standard_error": result.standard_error})
    if name:
        summary[name] = result.reward
        summary[f"{name}_standard_error"] = result.standard_error
    return summary


def image_counts(run: Run) -> dict[str, float]:
    """How many images were asked for, processed and encoded so far."""
    counts = {"images/encoded": run.engine.images_encoded}
    if run.store is not None:
        counts |= {"images/seen": run.store.seen, "images/processed": run.store.processed}
    return {name: float(count) for name, count in counts.items()}


def step_metrics(batch: GroupBatch) -> dict[str, float]:
    """What was played for one step, also what the filters then left out."""
    rollouts = batch.rollouts
    metrics = trajectory_metrics(rollouts.trajectories)
    metrics["sampled_tokens"] = float(sum(trajectory.num_sampled for trajectory in rollouts.trajectories))
    metrics["failed"] = float(len(rollouts.failed))
    metrics["groups/dropped"] = float(rollouts.dropped_groups)
    metrics["groups/stopped"], metrics["groups/filtered"] = float(rollouts.stopped_groups), float(batch.filtered)
    metrics["groups/too_old"] = float(batch.too_old)
    return metrics


def leave_behind(run: Run, log: RunLog, trajectories: Sequence[Trajectory]) -> None:
    """The reward curve, the trajectory page and the last batch's records."""
    if not trajectories or not log.rows():
        return
    chance = run.config.eval.chance
    levels = {} if chance is None else {"chance": chance}
    draw_curve(log.rows(), run.folder / "reward.png", title=run.config.name, levels=levels)
    shown = trajectories[:PAGE_TRAJECTORIES]
    write_page(shown, run.folder / "trajectories.html", title=run.config.name, decode=run.model.renderer.decode)


def new_buffer(run: Run) -> RolloutBuffer:
    config = run.config
    kind = AsynchronousBuffer if config.train.max_staleness else SynchronousBuffer
    return kind(run.runner(), TaskStream(run.tasks), run.filters, config.algo, config.train)


def new_trainer(run: Run) -> RunTrainer:
    config = run.config
    steps_per_batch = config.train.groups_per_batch // (config.train.groups_per_step or config.train.groups_per_batch)
    return run.trainers.start(
        replace(config.algo, old_policy=config.old_policy),
        optim=config.optim,
        total_steps=config.train.steps * steps_per_batch,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        temperature=config.rollout.temperature or 1.0,
        groups_per_step=config.train.groups_per_step,
        share_prefixes=config.train.share_prefixes,
        replay_routing=config.train.replay_routing,
    )


async def push_weights(run: Run, trainer: RunTrainer, policy_version: int) -> dict[str, float]:
    """Hand the trainer's weights to the paused engine, unless it samples from the very same ones; metrics of how servers took them."""
    if run.receive is not None:
        trainer.send_weights(run.receive)
    metrics = {} if run.serving is None else await run.serving.push(trainer, policy_version)
    run.engine.weights_changed(policy_version)
    return metrics
