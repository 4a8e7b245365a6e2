"""Records of each step: metrics with timings, trajectories and failures, the reward curve and the run's page."""

from __future__ import annotations

import functools
import time
from typing import Any

from vlmrl.config import Config
from vlmrl.report.advisor import Advisor
from vlmrl.report.curve import draw_curve
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.report.trajectory_log import KEPT_WHOLE, TrajectoryLog
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import PAGE, write_snapshot
from vlmrl.rollout.batches import GroupBatch
from vlmrl.rollout.buffer import SynchronousBuffer
from vlmrl.rollout.failures import list_reasons
from vlmrl.rollout.runner import RolloutError
from vlmrl.run.build import Run
from vlmrl.train.turn_states import rewards_by_place
from vlmrl.utils.threads import DaemonPool


class Recorder:
    """Times the stages of a step and writes its results: ``play``, then ``end_step``; ``finish`` at the end of the run."""

    def __init__(self, run: Run, log: RunLog, progress: RunProgress) -> None:
        self.log = log
        self._run = run
        self._progress = progress
        self._trajectories = trajectory_log(run, log)
        self._advisor = Advisor(log, run.config, progress.say)
        self._unwritten: tuple[int, GroupBatch] | None = None
        self._counts: dict[str, float] = {}
        self._began = self._rolled_out = 0.0

    async def play(self, step: int, buffer: SynchronousBuffer) -> GroupBatch:
        """Take the step's batch from the buffer. If too many of its trajectories fail, they are written before the error is raised."""
        self._counts = _counts(self._run)
        self._began = time.perf_counter()
        try:
            played = await buffer.take(step)
        except RolloutError as error:
            await self._trajectories.write(step, "train", [], error.failed)
            self._progress.say(
                f"all {len(error.failed)} failed trajectories are in {self.log.folder / 'trajectories.jsonl'}"
            )
            raise
        self._rolled_out = time.perf_counter()
        self._unwritten = step, played
        return played

    async def end_step(self, metrics: dict[str, Any]) -> dict[str, float | None]:
        """Log the step. Returns the numbers for the progress bar."""
        assert self._unwritten is not None
        step, batch = self._unwritten
        now = time.perf_counter()
        seconds = {"time/rollout": self._rolled_out - self._began, "time/train": now - self._rolled_out}
        seconds |= {f"time/{part}": spent for part, spent in self._run.seconds.take().items()}
        counts = {name: count - self._counts.get(name, 0.0) for name, count in _counts(self._run).items()}
        row = _batch_metrics(batch, self._run.config) | counts | _image_memory(self._run) | metrics | seconds
        records = await self._write_trajectories()
        self.log.log(step, row)
        self._advisor.after_step({"step": step, **row}, records)
        return {
            "reward": row.get("reward/mean"),
            "tokens/episode": row.get("sampled_tokens/mean"),
            "tokens/s": row["sampled_tokens"] / (time.perf_counter() - self._began),
        }

    def is_idle(self) -> bool:
        """Whether the last `train.stop_after_idle` steps had no learning signal."""
        limit = self._run.config.train.stop_after_idle
        if not 0 < limit <= self._advisor.idle_steps:
            return False
        self._progress.say(f"the training ends: its last {limit} steps had no learning signal (train.stop_after_idle)")
        return True

    def judge_evaluations(self) -> None:
        """Print the advisories on what was evaluated so far."""
        self._advisor.after_evaluations()

    async def finish(self) -> None:
        """Write the curve and the page, and before them the batch of a step that did not end, without the trainer's numbers."""
        await self._write_trajectories()
        self.judge_evaluations()
        try:
            await drawing_thread().run(_write_pages, self._run.config, self.log.rows())
        except Exception as error:  # a damaged line, a full disk, the user's settings of matplotlib: they only show
            self._progress.say(f"the curve and the page could not be written: {str(error) or type(error).__name__}")

    async def _write_trajectories(self) -> list[dict[str, Any]]:
        if self._unwritten is None:
            return []
        (step, batch), self._unwritten = self._unwritten, None
        played, failed = batch.rollouts.trajectories, batch.rollouts.failed
        records = await self._trajectories.write(step, "train", played, failed)
        if failed:
            count = f"{len(failed)} of {len(played) + len(failed)} trajectories failed"
            self._progress.say(f"step {step}: {count}:\n{list_reasons(failed)}")
        return records


@functools.cache
def drawing_thread() -> DaemonPool:
    """One thread for all runs of the process: matplotlib opens its fonts again for each thread that draws, and keeps them open."""
    return DaemonPool("pages")


def _write_pages(config: Config, rows: list[dict[str, Any]]) -> None:
    """Draw the reward curve, and write the page of `vlmrl view`, with everything that was logged."""
    if any({"reward/mean", "eval/reward/mean"} & row.keys() for row in rows):  # supervised steps alone have none
        levels = {} if config.eval.chance is None else {"chance": config.eval.chance}
        draw_curve(rows, config.folder / "reward.png", title=config.name, levels=levels)
    if rows:
        write_snapshot([FollowedRun(config.folder)], config.folder / PAGE, config.name)


def trajectory_log(run: Run, log: RunLog) -> TrajectoryLog:
    """What writes the trajectories of the run's steps and evaluations."""
    return TrajectoryLog(log, run.model.renderer.decode, KEPT_WHOLE)


def _counts(run: Run) -> dict[str, float]:
    """Since the run began: images requested, processed and encoded, the seconds of images and engine, and requests of agents."""
    counts = {"images/encoded": float(run.engine.images_encoded)}
    counts |= {f"time/{part}": seconds for part, seconds in run.engine.seconds.items()}
    if run.agents is not None:
        counts |= {f"gateway/{name}": float(count) for name, count in run.agents.server.counts.items()}
    if run.store is not None:
        counts |= {"images/seen": float(run.store.seen), "images/processed": float(run.store.processed)}
        counts["time/images"] = run.store.seconds
    return counts


def _image_memory(run: Run) -> dict[str, float]:
    """GiB of images' pixels in this process: in memory now and at the most so far, and in its file now."""
    usage = {} if run.store is None else run.store.memory.usage()._asdict()
    return {f"images/{name}_gib": size / 2**30 for name, size in usage.items()}


def _batch_metrics(batch: GroupBatch, config: Config) -> dict[str, Any]:
    """Metrics of all trajectories sampled for one step, including groups that the filters removed."""
    rollouts = batch.rollouts
    everything = [*rollouts.trajectories, *rollouts.failed]
    metrics = trajectory_metrics(everything)
    metrics["sampled_tokens"] = float(sum(trajectory.num_sampled for trajectory in rollouts.trajectories))
    by_turn = config.algo.credit != "trajectory"
    compared = [[rewards_by_place(each) if by_turn else each.reward for each in group] for group in rollouts.groups]
    groups = {
        "played": len(compared),
        "zero_variance": sum(rewards == rewards[:1] * len(rewards) for rewards in compared),
        "dropped": rollouts.dropped_groups,
        "bad_rows": len(rollouts.bad_rows),
        "rejected": rollouts.rejected_groups,
        "stopped": rollouts.stopped_groups,
        "filtered": batch.filtered,
        "too_old": batch.too_old,
    }
    metrics |= {f"groups/{name}": float(count) for name, count in groups.items()}
    if env := [each.metrics["env_cpu_seconds"] for each in everything if "env_cpu_seconds" in each.metrics]:
        metrics["time/env"] = sum(env)
    return metrics
