"""A run's folder: finds its checkpoint and its newest weights, and renames an earlier run."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from vlmrl.config import Config
from vlmrl.config.checks import refuse_if
from vlmrl.config.saved import read_settings
from vlmrl.model.loading import shapes_of
from vlmrl.model.policy import Policy
from vlmrl.report.json_lines import JsonLinesTail
from vlmrl.report.launch_command import resume_command
from vlmrl.report.records import changed_settings, plain
from vlmrl.report.run_log import RunLog, check_sizes, read_rows
from vlmrl.run.checkpointing import LoopState, is_newer
from vlmrl.train.checkpoint import (
    KINDS,
    SavedTensors,
    check_random,
    complete_checkpoints,
    newest_checkpoint,
    remove_parts,
)
from vlmrl.utils.json_files import read_object
from vlmrl.utils.output_files import remove_folder
from vlmrl.utils.require import require

TRACKER_FOLDERS = ("trackers", "tensorboard")


def check_resume(config: Config, checkpoint: Path) -> Mapping[str, int]:
    """Check that the run of ``config`` can continue from its ``checkpoint``. Nothing is written. Returns the sizes of the log's files.

    Raises:
        ValueError: the checkpoint is of another model, or the log is shorter than it was.
    """
    state = LoopState.load(checkpoint)
    stage = state.stage
    check_sizes(config.folder, state.log)
    is_on = {"warm_start": bool(config.warm_start.steps), "sft": bool(config.sft.data), "train": True}
    setting = {"warm_start": "warm_start.steps", "sft": "sft.data"}.get(stage, stage)
    rule = f"set to resume from {checkpoint}, which is in that stage: repeat the options of the run"
    require(is_on[stage], setting, rule, None)
    past = stage == "train" and not config.train.steps and bool(config.sft.data)
    refuse_if(past, f"{checkpoint} is of training, after the fine-tuning: continue with `vlmrl train RECIPE --resume`.")
    changed = _changed(config.folder, config)
    before, now = changed.get("model.lora.alpha", (None, None))
    if config.model.lora.rank and before is not None:
        raise ValueError(
            f"model.lora.alpha must be {before}, as until {checkpoint}, but it is {now}: its adapters were trained with it, and would "
            "be another change of the weights. To learn faster, raise optim.lr."
        )
    before, now = changed.get("sft.rows_per_step", (None, None))
    if stage == "sft" and before is not None:
        raise ValueError(
            f"sft.rows_per_step must be {before}, as until {checkpoint}, but it is {now}: the position in the data is counted in "
            "steps, so that rows would be skipped or repeated. For less memory, lower train.tokens_per_micro_batch."
        )
    # a stage before training has no references
    SavedTensors(checkpoint).check(_trained_shapes(config), KINDS if stage == "train" else KINDS[:1])
    check_random(checkpoint)
    return _with_last_evaluation(config, state)


def _with_last_evaluation(config: Config, state: LoopState) -> Mapping[str, int]:
    """The sizes of the log's files. Where a run goes on after an earlier last step, they include the evaluations after that step.

    Where the log had an evaluation of that step when the checkpoint was written, the later ones are left out.
    """
    sizes = dict(state.log)
    is_logged = sizes.keys() >= {"metrics.jsonl", "trajectories.jsonl"}
    if not is_logged or state.stage != "train" or not state.evaluated or state.step >= config.train.steps:
        return sizes
    with suppress(ValueError):  # a damaged line, of a machine that lost power, is removed
        for line in JsonLinesTail(config.folder / "metrics.jsonl").lines():
            of_step = line.value.get("step") == state.step
            if of_step and line.start < state.log["metrics.jsonl"] and "eval/tasks" in line.value:
                return state.log
            if of_step and line.start >= state.log["metrics.jsonl"]:
                sizes["metrics.jsonl"] = line.start + line.size
    if sizes["metrics.jsonl"] == state.log["metrics.jsonl"]:
        return sizes
    with suppress(ValueError):
        for line in JsonLinesTail(config.folder / "trajectories.jsonl", sizes["trajectories.jsonl"]).lines():
            if line.value.get("step") == state.step:
                sizes["trajectories.jsonl"] = line.start + line.size
    return sizes


def _trained_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights, the reference and the average that a checkpoint of this run has, by name."""
    policy = Policy(shapes_of(config.model, config.models_dir))
    named = {name: (tuple(weight.shape), weight.requires_grad) for name, weight in policy.named_parameters()}
    shapes = {f"weight/{name}": shape for name, (shape, trained) in named.items() if trained}
    if config.algo.kl_coef and not config.model.lora.rank:
        shapes |= {f"reference/{name}": shape for name, (shape, _) in named.items()}
    if config.teacher.model == "average":
        shapes |= {f"teacher/{name}": shape for name, (shape, trained) in named.items() if trained}
    return shapes


def has_finished(config: Config, checkpoint: Path, has_held_out: bool) -> bool:
    """Whether all steps are done, and the evaluations and the model that come after them were written since the ``checkpoint``."""
    state = LoopState.load(checkpoint)
    if state.stage != "train" or state.step < config.train.steps:
        return False
    weights = ["model", "adapters"] if config.model.lora.rank else ["model"]
    written = ["summary.json", *(weights if config.save_model else [])]
    if not all(is_newer(config.folder, name, checkpoint) for name in written):
        return False
    evaluated = ["reward_after"] * has_held_out + ["reward_blanked"] * config.eval.blank_images
    return set(evaluated) <= (read_object(config.folder / "summary.json") or {}).keys()


def describe_changes(folder: Path, config: Config) -> list[str]:
    """The settings that differ from those in the run's ``config.json``, a line each."""
    changed = _changed(folder, config)
    return [f"          {name} is now {new}, and was {old}" for name, (old, new) in changed.items()]


def describe_changed_rows(checkpoint: Path, contents: Mapping[str, str]) -> list[str]:
    """A line for each dataset whose rows differ from those that the run had until its ``checkpoint``, and what follows from it."""
    before = LoopState.load(checkpoint).contents or {}
    changed = [name for name in contents if before.get(name, contents[name]) != contents[name]]
    lines = [f"          the rows of {name} are others: {contents[name]}, and were {before[name]}" for name in changed]
    note = "          rows that were trained on may be held out now, so that evaluations before and after cannot be compared"
    return [*lines, note] if lines else []


def _changed(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    settings = read_settings(folder)
    if settings is None:
        return {}
    # The folder may have been moved.
    return changed_settings({**settings, "output_dir": config.output_dir}, plain(config))


@contextmanager
def earlier_run_set_aside(folder: Path) -> Iterator[str | None]:
    """Rename the folder of an earlier run to `name.1`, `name.2`, and so on. Yields a message, or None if there was none.

    If the block raises, what it wrote is deleted, and the earlier run's folder has its name again. The folder of a run that made no
    step is used again, so that failed attempts do not pile up. The files of its trackers are deleted: with them, the trackers would
    continue the earlier run and leave out the steps that they have.
    """
    if not _has_trained(folder):
        for name in TRACKER_FOLDERS:
            remove_folder(folder / name)
        yield None
        return
    steps, checkpoints = _steps(folder), complete_checkpoints(folder / "checkpoints")
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.rename(folder.with_name(f"{folder.name}.{number}"))
    try:
        line = f"earlier   {folder} held a run of {steps} step{'s' * (steps != 1)}: it is now {aside}."
        remove_parts(aside / "checkpoints")
        weights = f" --model.path {aside / 'model'} begins with its weights." if (aside / "model").exists() else ""
        none = f"It has no checkpoint to continue from.{weights}"
        yield f"{line} {_how_to_continue_earlier(aside) if checkpoints else none}"
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        raise


def inode_of(folder: Path) -> tuple[int, int] | None:
    """What distinguishes a folder from another one of its name. None: there is no such folder."""
    with suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None


def folder_with_inode(folder: Path, inode: tuple[int, int] | None) -> Path | None:
    """The folder that had this ``inode``: a new run of its name may have set it aside meanwhile, as `NAME.1`. None: it is gone."""
    near = chain([folder], folder.parent.glob(f"{glob.escape(folder.name)}.*"))
    return next((each for each in near if inode is not None and inode_of(each) == inode), None)


def _has_trained(folder: Path) -> bool:
    return bool(_steps(folder) or complete_checkpoints(folder / "checkpoints") or (folder / "model").exists())


def _steps(folder: Path) -> int:
    """Those of the training, or else of a fine-tuning or a warm start."""
    return trained_steps(folder) or _last_step(folder, "sft/loss")


def check_is_no_other(folder: Path) -> None:
    """Raises ValueError if ``folder`` holds collected episodes, a model, or another program's logs: a run would overwrite them."""
    found = read_object(folder / "config.json") or {}
    holds = "collected episodes" if "collect" in found else "a model" if "model_type" in found else None
    foreign = [name for name in ("config.json", *RunLog.FILES) if (folder / name).exists()]
    if holds is None and foreign and read_settings(folder) is None and not _has_trained(folder):
        holds = f"{', '.join(foreign)} of another program"
    refuse_if(holds is not None, f"name must be that of a run, but {folder} holds {holds}: set another name.")


def check_models_elsewhere(config: Config) -> None:
    """Raises ValueError if a model that the run begins with is in its own folder, which the run sets aside, and whose model it writes.

    The adapters of a checkpoint would be those of another model: added to weights that they are merged into, when it is resumed.
    """
    own = os.path.realpath(config.folder)
    for name, path in (("model.path", config.model.source), ("teacher.model", config.teacher.model)):
        folder = None if path is None else Path(path).expanduser()
        refuse_if(
            folder is not None and folder.is_dir() and Path(os.path.realpath(folder)).is_relative_to(own),
            f"{name} must be outside of {config.folder}, where the run writes its own model, but it is {path!r}: set another name. "
            f"If {config.folder} was renamed, as a new run of its name does, give the path in the renamed folder.",
        )


def _how_to_continue_earlier(aside: Path) -> str:
    command = resume_command(aside, aside.name)
    return f"To continue it instead: {command or f'resume the run of name {aside.name!r}'}"


def trained_steps(folder: Path) -> int:
    """The last training step in the metrics of a run; 0 if there is none."""
    return _last_step(folder, "groups/trained")


def _last_step(folder: Path, metric: str) -> int:
    """The last step whose row in the metrics of a run has ``metric``; 0 if there is none."""
    steps = (row.get("step") for row in read_rows(folder / "metrics.jsonl") if metric in row)
    return max((step for step in steps if isinstance(step, int)), default=0)


def newest_weights(run: Path, saved: str = "model") -> Path | None:
    """The weights that a run wrote last: its newest checkpoint, or its folder ``saved`` (``model`` or ``adapters``)."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    return run / saved if is_newer(run, saved, checkpoint) else checkpoint
