"""Collects episodes: plays a recipe's training tasks with any model, records every episode, and writes the best ones.

    runs/NAME-episodes/trajectories.jsonl   every episode that ended, failed ones too, for `vlmrl view` and for the next command
    runs/NAME-episodes/episodes.jsonl       the episodes to keep, a JSON object a line (`episode_rows.py`)
    runs/NAME-episodes/images/ID.png        their images, by content

A record is appended when its episode ends, so that a stopped or killed command can continue: a recorded episode is never played
again. ``episodes.jsonl`` is made of the records when a command ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vlmrl.config import Config
from vlmrl.config.checks import refuse_if
from vlmrl.config.collection import Collection
from vlmrl.data import Tasks, contents
from vlmrl.data.conversations import EPISODES
from vlmrl.data.stream import Draw
from vlmrl.engine.chat_engine import ApiModel, BudgetSpentError
from vlmrl.report.progress import Phase, RunProgress
from vlmrl.report.records import changed_settings, plain
from vlmrl.report.run_log import RunLog
from vlmrl.report.trajectory_log import TrajectoryLog
from vlmrl.run.build import Run
from vlmrl.run.episode_rows import Recorded, collected_fields, episode_id, read_recorded, write_episodes
from vlmrl.run.eval_program import build_model_run, resolve_eval_models
from vlmrl.run.playing import ApiRun, Playing, build_api_run
from vlmrl.run.run_lock import run_lock
from vlmrl.run.stopping import ended_as_by_ctrl_c
from vlmrl.types import Trajectory
from vlmrl.utils.json_files import read_object
from vlmrl.utils.output_files import atomic_write
from vlmrl.utils.require import require
from vlmrl.utils.threads import run_awake

SAME = {"collect", "model", "data", "mixture", "env", "env_options", "reward", "rollout", "seed", "agent"}
"""Settings, and sections, that all commands for one folder must share, or its episodes would not mean the same."""
RECORDED = ("collect.weights", "collect.rows.")
"""What is no setting: a hash of the weights, and of each dataset's rows. Of other rows, a task's number is that of another task."""
MAY_DIFFER = {"max_concurrent", "engine_timeout", "env_timeout", "max_refills", "max_failed_fraction"}
MAY_DIFFER |= {"max_env_retries_per_turn", "kv_cache_gib", "group_size", "over_sampling", "samples"}
"""Settings of ``rollout`` that change no episode."""


@ended_as_by_ctrl_c()
def run_collection(
    config: Config, collection: Collection, model: str | None = None, api: ApiModel | None = None
) -> None:
    """Collect with the model behind ``api``, or with ``model`` (see :func:`resolve_eval_models`), or with the recipe's own.

    Prints what became of all episodes. After Ctrl-C, SIGTERM, SIGHUP or an error, what has been played is written all the same.
    """
    require(config.rollout.generate is None, "rollout.generate", "unset: it makes token ids, not messages", "set")
    require(config.group_reward is None, "group_reward", "unset: episodes are played one by one", config.group_reward)
    progress = RunProgress()
    folder = (collection.out or config.folder.with_name(f"{config.name}-episodes")).absolute()
    with run_lock(folder):
        run, name = _player(config, model, api)
        try:
            _collect(run, folder, collection, name, progress)
        finally:
            run.close()
            if isinstance(run, ApiRun):
                progress.say(run.engine.report())


def _player(config: Config, model: str | None, api: ApiModel | None) -> tuple[Playing, str]:
    """What plays, and the name of its model."""
    if api is not None:
        return build_api_run(config, api), api.name
    (own,) = resolve_eval_models([model] if model else [], config)
    return build_model_run(replace(config, model=own.settings), own), own.name


def _collect(run: Playing, folder: Path, collection: Collection, model: str, progress: RunProgress) -> None:
    recorded = read_recorded(folder)
    _check_episodes(folder, recorded)
    collected = {"model": model, **_weights(run)}
    settings = {**plain(run.config), "collect": collected | {"rows": contents("data", run.tasks)}}
    _check_settings(folder, settings, run.tasks)
    with RunLog(folder, {"trajectories.jsonl": recorded.size}) as log:
        log.write_config(settings)
        collector = Collector(run, collection, model, log, recorded)
        try:
            run_awake(collector.play(progress))
        except BudgetSpentError as error:
            progress.say(f"stopped: {error}")
        finally:
            counts = write_episodes(folder, collection.keep)
            counts["too_long"] = collector.too_long
            counts["left"] = max(0, collector.planned - counts["played"] - counts["failed"] - counts["too_long"])
            summary = {name: value for name, value in counts.items() if name != "reasons"}
            atomic_write(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
            progress.say(_report(folder, counts))


def _check_episodes(folder: Path, recorded: Recorded) -> None:
    """Raises ValueError if the folder has episodes without records, or another program's files: they would be replaced."""
    ours = (folder / "config.json").exists()
    replaced = [folder / name for name in (EPISODES, *([] if ours else ["metrics.jsonl", "summary.json"]))]
    found = [path.name for path in replaced if path.exists() and path.stat().st_size > 0]
    refuse_if(
        bool(found) and not recorded.size,
        f"{folder} has {', '.join(found)}, and trajectories.jsonl has no record of their episodes: they would be replaced. "
        "Name another folder with --out.",
    )


def _weights(run: Playing) -> dict[str, str]:
    """A hash of a sample of each weight, which training changes; the same in every dtype. Empty where this process has no weights."""
    if not isinstance(run, Run) or run.model.is_on_meta:
        return {}
    hasher = hashlib.blake2b(digest_size=8)
    for weight in run.model.policy.parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 4096)]
        hasher.update(some.bfloat16().cpu().view(torch.int16).numpy().tobytes())
    return {"weights": hasher.hexdigest()}


def _check_settings(folder: Path, settings: dict[str, Any], tasks: Tasks) -> None:
    """Raises ValueError if the folder has episodes of another model, of other rows, or under other settings."""
    before = read_object(folder / "config.json") or {}
    collected = before.get("collect")
    if isinstance(collected, dict) and isinstance(collected.get("rows"), dict):
        # Rows that were only added leave the others' numbers as they are.
        rows = contents("data", tasks, collected["rows"])
        settings = settings | {"collect": settings["collect"] | {"rows": rows}}
    changed = changed_settings(before, json.loads(json.dumps(settings))) if before else {}
    changed = {name: pair for name, pair in changed.items() if _must_be_same(name)}
    # of an earlier version, or of servers
    unknown = [name for name in changed if name.startswith(RECORDED) and None in changed[name]]
    changed = {name: pair for name, pair in changed.items() if name not in unknown}
    if changed:
        retrained = ["  the weights of the model have changed since"] * bool(changed.pop("collect.weights", None))
        lines = [
            f"  {name.replace('collect.rows.', 'the dataset ')} is now {new!r:.80}, and was {old!r:.80}"
            for name, (old, new) in sorted(changed.items())
        ]
        raise ValueError(
            f"{folder} has episodes under other settings: name another folder with --out.\n"
            + "\n".join(retrained + lines)
        )


def _must_be_same(name: str) -> bool:
    return name.partition(".")[0] in SAME and name.removeprefix("rollout.") not in MAY_DIFFER


class Collector:
    """Plays the episodes that have no record yet. ``planned`` counts all episodes, ``too_long`` those of prompts over the limit."""

    def __init__(self, run: Playing, collection: Collection, model: str, log: RunLog, recorded: Recorded) -> None:
        self.run = run
        self.collection = collection
        self.count = min(len(run.tasks), collection.tasks or len(run.tasks))
        self.planned = self.count * collection.episodes
        self.too_long = 0
        self._missing = self.planned
        self._slots = asyncio.Semaphore(run.config.rollout.max_concurrent)
        self._log = log
        self._done = recorded.done(collection.retry_failed)
        # not in lockstep, which waits for whole groups
        self._runner = run.runner(engine=run.engine) if isinstance(run, Run) else run.runner()
        self._records = TrajectoryLog(log, run.model.renderer.decode, 1, lambda each: collected_fields(each, model))
        self._rewards: list[float] = []
        self._failed: list[Trajectory] = []

    async def play(self, progress: RunProgress) -> None:
        """Play what is left. Raises RolloutError if too much fails."""
        for line in await self.run.connect():
            progress.say(line)
        every = {task: range(self.collection.episodes) for task in range(self.count)}
        left = {task: [each for each in members if (task, each) not in self._done] for task, members in every.items()}
        self._missing = sum(map(len, left.values()))
        stream = self.run.stream(self.run.tasks, once=True)
        try:
            with progress.phase("collect", self.planned, self.planned - self._missing) as phase:
                async with asyncio.TaskGroup() as group:
                    for task, members in left.items():
                        draw = await stream.load(task) if members else None
                        if draw is not None:
                            await self._start(task, members, draw, group, phase)
                        else:
                            self.too_long += len(members)  # of none that is left to play, if all have ended
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            stream.close()
            if self._rewards:
                self._log.log(0, {"reward/mean": fmean(self._rewards), "trajectories": len(self._rewards)})

    async def _start(
        self, number: int, members: Sequence[int], draw: Draw, group: asyncio.TaskGroup, phase: Phase
    ) -> None:
        """Start the ``members`` of a task as slots become free. Its draw, and with it its images, is kept until they have ended."""
        for member in members:
            await self._slots.acquire()
            playing = group.create_task(self._play(number, member, draw, phase))
            playing.add_done_callback(lambda _: self._slots.release())

    async def _play(self, number: int, member: int, draw: Draw, phase: Phase) -> None:
        group_id = episode_id(number)
        tries: list[Trajectory] = []
        if draw.error is None:
            await self._runner.play_member(draw.task, group_id, member, tries.append)
        else:
            name = episode_id(number, member)
            tries.append(Trajectory(name, group_id, draw.task, ending="error", error=draw.error, non_retryable=True))
        writing = asyncio.create_task(self._records.write(0, "collect", [], tries))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing  # what has been played is not lost
            raise
        if tries[-1].failed:
            self._failed.append(replace(tries[-1], turns=[]))  # their images are not kept
        elif tries[-1].reward is not None:
            self._rewards.append(tries[-1].reward)
        phase.advance(reward=fmean(self._rewards) if self._rewards else None)
        self._runner.stop_if_too_many(self._failed, self._missing)


def _report(folder: Path, counts: dict[str, Any]) -> str:
    lines = [
        f"\nepisodes      {counts['played']} played, {counts['failed']} failed, {counts['too_long']} with too long a prompt, "
        f"{counts['left']} left; {counts['written']} written to {folder / 'episodes.jsonl'}"
    ]
    lines += [f"              {count} not written: {reason}" for reason, count in counts["reasons"].items()]
    if counts["left"]:
        lines.append("              the same command plays those that are left")
    return "\n".join([*lines, f"look at it    vlmrl view {folder} --serve"])
