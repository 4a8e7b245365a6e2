"""The loop's state, and the files that a run saves: checkpoints, the trained model, the summary."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from vlmrl.config.fields import check_type
from vlmrl.engine.base import paused
from vlmrl.model.lora import save_adapters
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.buffer import SynchronousBuffer
from vlmrl.run.build import Run
from vlmrl.run.stages import push_weights
from vlmrl.train.checkpoint import (
    complete_checkpoints,
    load_json,
    load_random,
    random_state,
    readable,
    save_json,
    save_random,
)
from vlmrl.train.controller import RunTrainer
from vlmrl.utils.json_files import read_object
from vlmrl.utils.output_files import atomic_folder, atomic_write
from vlmrl.utils.require import require

Stage = Literal["warm_start", "sft", "train"]
"""A stage of a run: one of :data:`vlmrl.train.checkpoint.STAGES`."""


class _Position(TypedDict):
    """The state of a :class:`~vlmrl.data.TaskStream`."""

    drawn: int
    too_long: int


_BATCHES: Mapping[str, Mapping[str, Any]] = {
    "warm_start": {"tasks": _Position, "failed": int},
    "sft": {"bad_rows": dict[str, int]},
    "train": {"tasks": _Position, "started": int | None, "unfinished": dict[str, int] | None},
}
"""The types of :attr:`LoopState.batches` by stage; ``None`` is for what only asynchronous training has."""
SAVED_LAST = {"model": "config.json", "adapters": "adapter_config.json"}
"""A file of each folder of weights in Hugging Face form, without which it is not whole."""
ORDER = "saved.json"
"""In a run's folder: after which checkpoints the models and the summary were written. Times change when a folder is copied."""
# Seconds for a colocated engine to release its memory to the trainer, which then saves a run that failed.
LAST_PAUSE = 150.0
STOPPED_PAUSE = 10.0  # the same after a stop, of whose seconds of grace some must be left for saving


@dataclass
class LoopState:
    """The loop's part of a checkpoint: the state when the last step ended, which a stopped run saves."""

    stage: Stage = "train"
    step: int = 0
    """The last step of the stage."""
    earlier_steps: int = 0
    """Steps of the stages before it: the steps of trackers rise over all stages, those of the log begin at 1 in each."""
    evaluated: bool = True
    """Whether the evaluation that is due after the step is in the log. If not, a resumed run begins with it."""
    batches: dict[str, Any] = field(default_factory=dict)
    """The state of the rollout buffer, or of a supervised stage's source."""
    log: dict[str, int] = field(default_factory=dict)
    """The sizes of the log files."""
    summary: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    """The best held-out reward of a model that was kept."""
    contents: dict[str, str] | None = None
    """What :attr:`Run.contents` was. None: an earlier version did not save it."""

    def __post_init__(self) -> None:
        self.random = random_state()  # in a file of its own

    @classmethod
    def load(cls, checkpoint: Path | None) -> LoopState:
        """The state of a checkpoint, or of a run that begins. Raises ValueError for another one than a run writes."""
        if checkpoint is None:
            return cls()
        values = load_json(checkpoint)
        with readable(checkpoint):
            _check_state(values)
        return cls(**values)

    def end_step(self, step: int, batches: dict[str, Any], log: RunLog | None, *, evaluated: bool) -> None:
        """Keep the state at the end of ``step``."""
        sizes = {} if log is None else log.sizes()  # a disk that fails leaves the state of the step before
        self.step, self.evaluated, self.batches, self.log = step, evaluated, batches, sizes
        self.random = random_state()

    def end_stage(self, log: RunLog) -> None:
        """All steps of the stage are done."""
        log.trackers.earlier_steps = self.earlier_steps + self.step

    def begin(self, stage: Stage, batches: dict[str, Any], log: RunLog | None) -> None:
        """Keep the state before the first step of ``stage``, after the last step of the stage before it."""
        self.earlier_steps += self.step
        self.stage = stage
        self.end_step(0, batches, log, evaluated=True)

    def restore(self, trainer: RunTrainer, checkpoint: Path) -> None:
        """Restore the trainer and this process's random number generators. A better model that was kept later stays the best."""
        trainer.restore(checkpoint)
        load_random(checkpoint, "driver")
        self.random = random_state()
        self.best = best_reward(checkpoint.parents[1], self.best)


def _check_state(values: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the field, for values of a ``run.json`` that have been edited."""
    kinds = get_type_hints(LoopState)
    unknown = sorted(values.keys() - kinds.keys())
    require(not unknown, "run.json", "without fields that vlmrl does not know", unknown)
    for name, kind in kinds.items():
        check_type(f"run.json: {name}", values.get(name), kind)
    for name, kind in _BATCHES[values["stage"]].items():
        check_type(f"run.json: batches.{name}", values["batches"].get(name), kind)
    for name, count in _counts("", {key: value for key, value in values.items() if key not in ("summary", "best")}):
        require(count >= 0, f"run.json: {name}", "0 or more", count)
    numbers = values["batches"].get("unfinished") or {}
    require(all(map(str.isdecimal, numbers)), "run.json: batches.unfinished", "with numbers of groups as keys", numbers)


def _counts(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """The whole numbers in JSON types, with the names of their fields."""
    if isinstance(value, int):
        yield name, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _counts(f"{name}.{key}".lstrip("."), inner)


async def save_checkpoint(run: Run, trainer: RunTrainer, state: LoopState) -> None:
    """Write a checkpoint of the last step. A colocated engine sleeps meanwhile."""
    with run.seconds.of("checkpoint"):
        async with paused(run.engine) if run.colocated else nullcontext():
            await asyncio.to_thread(write_checkpoint, run, trainer, state)


def write_checkpoint(run: Run, trainer: RunTrainer, state: LoopState) -> None:
    """Write a checkpoint of the last step while the engine is paused."""
    with run.checkpoints.new(state.step, state.stage) as folder:
        trainer.save(folder)
        save_random(folder, "driver", state.random)
        save_json(folder, asdict(state))


async def restore(run: Run, trainer: RunTrainer, buffer: SynchronousBuffer, state: LoopState, checkpoint: Path) -> None:
    """Restore the trainer, the paused engine's weights and the rollout buffer."""
    state.restore(trainer, checkpoint)
    await push_weights(run, trainer, state.step)
    buffer.restore(state.batches)


async def save_model(run: Run, trainer: RunTrainer) -> None:
    """Write the trained weights in Hugging Face form, and LoRA adapters also separately."""
    if run.colocated:
        await run.engine.pause()
    _save_weights(run, trainer, run.folder / "model")
    _save_adapters(run, trainer)


async def save_best(run: Run, trainer: RunTrainer, state: LoopState, step: int, reward: float) -> None:
    """Keep the model in the folder ``best`` if its held-out ``reward`` is the best so far (`checkpoint.keep_best`)."""
    if not run.config.checkpoint.keep_best or (state.best is not None and reward <= state.best):
        return
    async with paused(run.engine) if run.colocated else nullcontext():
        _save_weights(run, trainer, run.folder / "best", {"step": step, "reward": reward})
    state.best = reward


def best_reward(folder: Path, saved: float | None) -> float | None:
    """The best of a checkpoint's reward and of the model in the run's folder ``best``, which may be of a later step.

    None if that folder is gone: the next evaluation keeps its model.
    """
    if not (folder / "best").exists():
        return None
    kept = (read_object(folder / "best" / "best.json") or {}).get("reward")
    return max((reward for reward in (saved, kept) if isinstance(reward, int | float)), default=None)


async def save_stopped(run: Run, trainer: RunTrainer, state: LoopState, progress: RunProgress) -> None:
    """Save a run that was stopped."""
    await _pause_last(run, progress, STOPPED_PAUSE)
    save_summary(run, state)
    await _save_last(run, trainer, state, progress, checkpoint=True, with_adapters=True)


async def save_after_failure(
    run: Run, trainer: RunTrainer, state: LoopState, progress: RunProgress, error: BaseException
) -> None:
    """Write what a run that failed has trained, also in earlier stages, if the engine and the trainer still allow it.

    There is no checkpoint if the trainer is ahead of the last finished step or could not be started, or Ctrl-C ended the run.
    """
    if not trainer.has_trained:
        return
    await _pause_last(run, progress, LAST_PAUSE)
    may_continue = isinstance(error, Exception) and trainer.is_started and not trainer.is_ahead
    if await _save_last(run, trainer, state, progress, checkpoint=may_continue, with_adapters=False):
        last = f"step {state.step}" if state.step else f"the state before step 1 of stage {state.stage}"
        progress.say(f"{last} is saved: to continue from it, resume the run")


async def _save_last(
    run: Run, trainer: RunTrainer, state: LoopState, progress: RunProgress, *, checkpoint: bool, with_adapters: bool
) -> bool:
    """Write the weights of the last step and, if ``checkpoint``, a checkpoint of it. Returns whether there is one.

    With `checkpoint.every` 0 the weights come first, since there may be no earlier checkpoint: SIGTERM leaves few seconds, and
    a rank may not answer after a failure.
    """
    weights_first = not run.config.checkpoint.every
    saved = checkpoint and not weights_first and await _save_last_checkpoint(run, trainer, state, progress)
    written = _save_last_weights(run, trainer, progress, with_adapters)
    if checkpoint and weights_first:
        saved = await _save_last_checkpoint(run, trainer, state, progress)
        for name in written:
            record_saved(run.folder, name)  # of the same step as the checkpoint, which servers do not load
    return saved


async def _save_last_checkpoint(run: Run, trainer: RunTrainer, state: LoopState, progress: RunProgress) -> bool:
    """Write a checkpoint of the last step, unless it has one. Returns whether it has one.

    With `checkpoint.every` 0, a run that saves no model, or was stopped before its first step, gets none. What else can be saved does
    not depend on it: a rank may be gone, or the disk be full. That is said.
    """
    config = run.config
    if not (config.checkpoint.every or (config.save_model and trainer.differs_from_start)):
        return False
    try:
        if run.checkpoints.newest() != run.checkpoints.path(state.step, state.stage):
            await asyncio.to_thread(write_checkpoint, run, trainer, state)
    except Exception as failure:
        progress.say(f"the state of the last step could not be saved: {failure}")
        return False
    return True


async def _pause_last(run: Run, progress: RunProgress, seconds: float) -> None:
    """Pause a colocated engine for good. If it fails, such as after a signal that ended its servers, too, that is said."""
    if not run.colocated:
        return
    try:
        async with asyncio.timeout(seconds):
            await run.engine.pause()
    except Exception as error:
        progress.say(f"the engine did not release the GPUs to the trainer: {str(error) or type(error).__name__}")


def _save_last_weights(run: Run, trainer: RunTrainer, progress: RunProgress, with_adapters: bool) -> list[str]:
    """Write the weights, unless `save_model` is off. Returns the names of the folders that were written.

    ``with_adapters``: those of LoRA too, which are gathered from all ranks: after a failure one may not answer.
    """
    if not (run.config.save_model and trainer.differs_from_start):
        return []
    written = []
    try:
        _save_weights(run, trainer, run.folder / "model")
        written.append("model")
        if with_adapters and run.config.model.lora.rank:
            _save_adapters(run, trainer)
            written.append("adapters")
    except Exception as error:  # the trainer may have failed, or the disk or the memory be full
        progress.say(f"the weights of the last step could not be saved: {error}")
    return written


def save_summary(run: Run, state: LoopState) -> None:
    atomic_write(run.folder / "summary.json", json.dumps(state.summary, indent=2) + "\n")
    record_saved(run.folder, "summary.json")


def _save_weights(run: Run, trainer: RunTrainer, folder: Path, about: dict[str, float] | None = None) -> None:
    """Write this process's weights without calling other ranks; the trainer's if this process's are on the meta device.

    ``about`` is written beside them, as ``best.json``.
    """
    with atomic_folder(folder) as part:
        run.model.save(part, trainer.named_weights() if run.model.is_on_meta else None)
        if about is not None:
            (part / "best.json").write_text(json.dumps(about) + "\n")
    if about is None:
        record_saved(run.folder, folder.name)


def _save_adapters(run: Run, trainer: RunTrainer) -> None:
    """Write LoRA adapters, if the run trains any, as peft does."""
    model = run.config.model
    if model.lora.rank:
        with atomic_folder(run.folder / "adapters") as part:
            save_adapters(dict(trainer.named_adapters()), model.lora, run.model.path, part)
        record_saved(run.folder, "adapters")


def record_saved(run: Path, name: str) -> None:
    """Note in the folder ``run`` that ``name`` in it was written after all of its checkpoints."""
    earlier = list(map(_digest, complete_checkpoints(run / "checkpoints")))
    atomic_write(run / ORDER, json.dumps((read_object(run / ORDER) or {}) | {name: earlier}) + "\n")


def is_newer(run: Path, name: str, checkpoint: Path | None) -> bool:
    """Whether the folder ``run`` has ``name``, written after its newest ``checkpoint``.

    A run of an earlier version has no such order. The times of its files, which a copy of the folder may have changed, are compared.
    Raises ValueError if the checkpoint's ``run.json`` is a pipe or a device: the run may be somebody else's.
    """
    written = run / name / SAVED_LAST.get(name, "")
    if checkpoint is None or not written.exists():
        return written.exists()
    if (order := read_object(run / ORDER)) is not None:
        return _digest(checkpoint) in str(order.get(name))  # of any type, in a folder of others
    return written.stat().st_mtime_ns >= (checkpoint / "run.json").stat().st_mtime_ns


def _digest(checkpoint: Path) -> str:
    """What distinguishes a checkpoint from another one of the same name, such as of a step that was trained again."""
    path = checkpoint / "run.json"
    if not path.is_file():
        raise ValueError(
            f"{path} must be a file, but it is a pipe, a device or missing: give the folder of a run that is whole."
        )
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
