"""An evaluation as a program: plays the held-out tasks with each model, prints the tables and writes the results.

A model is a Hugging Face folder or name, a run's folder, or one of its checkpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from vlmrl.config import Cluster, Config, Lora, Model
from vlmrl.config.code import is_local_path, resolve_path
from vlmrl.config.saved import SavedRun, is_checkpoint
from vlmrl.engine.chat_engine import ApiModel
from vlmrl.report.advisories import Observed, truncated
from vlmrl.report.progress import RunProgress
from vlmrl.report.provenance import provenance
from vlmrl.run.build import Run, build_run
from vlmrl.run.eval_report import EvalRow, eval_document, print_report, row_name
from vlmrl.run.evaluate import evaluate_run, require_held_out
from vlmrl.run.playing import Playing, build_api_run
from vlmrl.run.run_folder import folder_with_inode, inode_of, newest_weights
from vlmrl.run.stopping import ended_as_by_ctrl_c
from vlmrl.train.checkpoint import load_weights
from vlmrl.utils.output_files import atomic_write, check_writable
from vlmrl.utils.threads import run_awake


@ended_as_by_ctrl_c()
def run_evaluation(
    config: Config, paths: Sequence[str] = (), out: Path | None = None, api: ApiModel | None = None
) -> None:
    """Evaluate the models that ``paths`` name, or that of ``config``, on the held-out tasks of ``config``, after that of an ``api``.

    Prints tables. Writes the results to ``out``, and those of a run's model, once all its passes are done, also to ``evaluations`` in
    the run's folder. If a pass fails, or a signal ends it, those before it are printed, and written to ``out`` with the names of the
    rest as ``not_evaluated``; after SIGKILL, ``out`` has the models before.
    """
    require_held_out(config)
    models = resolve_eval_models(paths, config) if paths or api is None else []
    if out is not None:
        check_writable(out, "--out")
        out = out.absolute()  # an env may change the working directory
    progress, origin = RunProgress(), provenance()
    names = [model.name for model in models]
    if api is not None:
        names.insert(0, f"{api.name} (API)" if api.name in names else api.name)
    expected = [row_name(name, blanked) for name in names for blanked in _passes(config)]
    rows: list[EvalRow] = []

    def write(to: Path) -> list[str]:
        done = {row.name for row in rows}
        missing = [name for name in expected if name not in done]
        write_document(to, eval_document(rows, config.seed, origin, config, missing))
        return missing

    try:
        if api is not None:
            evaluate_api(config, api, names[0], progress, rows)
        for number, model in enumerate(models, start=1):
            if len(models) > 1:
                progress.say(f"model {number} of {len(models)}: {model.name}")
            if rows and out is not None:
                with suppress(OSError):  # the disk may have room at the end
                    write(out)  # this model may need more memory than there is, and the system kill the process
            settings = replace(config, model=model.settings)
            inode = None if model.run_folder is None else inode_of(model.run_folder)
            evaluate_model(settings, model, progress, rows)
            if model.run_folder is not None:
                own = [row for row in rows if row.model == model.name]
                document = eval_document(own, config.seed, origin, settings)
                _write_to_run(folder_with_inode(model.run_folder, inode), model.name, document, progress)
    finally:  # also if a later one fails: those before it took hours, or an API's tokens
        if rows:
            print_report(progress.console, rows, config.seed)
        if rows and out is not None:
            missing = write(out)
            progress.say(f"results: {out}" + (f", without those of {', '.join(missing)}" if missing else ""))


def _write_to_run(folder: Path | None, name: str, document: dict[str, object], progress: RunProgress) -> None:
    """Write the results of a run's model to its folder, if that can be written: the run may be somebody else's."""
    if folder is None:
        progress.say(f"the results of {name} are not in its run's folder, which was moved or deleted meanwhile")
        return
    now = datetime.now().strftime("%Y%m%dT%H%M%S.%f")  # two evaluations may end in one second
    path = folder / "evaluations" / f"{now}-{Path(name).name}.json"
    try:
        write_document(path, document)
        progress.say(f"results of {name}: {path}")
    except OSError as error:
        progress.say(f"the results of {name} are not in its run's folder, which cannot be written: {error}")


def evaluate_api(config: Config, api: ApiModel, name: str, progress: RunProgress, rows: list[EvalRow]) -> None:
    """As :func:`evaluate_model`, of the model behind a chat API, which the rows call ``name``. Prints the tokens that it spent."""
    run = build_api_run(config, api)
    try:
        run_awake(_evaluate(run, name, progress, rows))
    finally:
        progress.say(run.engine.report())


def evaluate_model(config: Config, model: EvalModel, progress: RunProgress, rows: list[EvalRow]) -> None:
    """Append a row to ``rows``, and with ``eval.blank_images`` another with blanked images. On this machine, without Ray."""
    run = build_model_run(config, model)
    try:
        run_awake(_evaluate(run, model.name, progress, rows))
    finally:
        run.close()


def build_model_run(config: Config, model: EvalModel) -> Run:
    """The parts of a run with the weights of ``model``, whose settings ``config`` has."""
    if model.checkpoint is not None and config.has_servers:
        raise ValueError(
            f"{model.name}: only the embedded engine loads a checkpoint. Export it for servers: vlmrl export {model.name} --to FOLDER"
        )
    run = build_run(replace(config, cluster=Cluster()))
    try:
        if model.checkpoint is not None:
            load_weights(model.checkpoint, run.model.policy)
    except BaseException:
        run.close()
        raise
    return run


def write_document(path: Path, document: dict[str, object]) -> None:
    """Write JSON, also if the folder is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _passes(config: Config) -> tuple[bool, ...]:
    """Whether the images are blanked, of each pass over the held-out tasks."""
    return (False, True) if config.eval.blank_images else (False,)


async def _evaluate(run: Playing, name: str, progress: RunProgress, rows: list[EvalRow]) -> None:
    for line in await run.connect():
        progress.say(line)
    for blanked in _passes(run.config):
        began = time.monotonic()
        result = await evaluate_run(run, progress, label="blanked" if blanked else "eval", blank_images=blanked)
        seconds = time.monotonic() - began
        endings = [{"ending": trajectory.ending} for trajectory in result.trajectories]
        if (found := truncated(Observed(run.config, (), endings))) is not None:
            progress.say(f"advisory    {found[0]}")
        rows.append(EvalRow.of(name, result, blanked=blanked, seed=run.config.seed, seconds=seconds))


@dataclass(frozen=True)
class EvalModel:
    """One model to evaluate."""

    name: str
    """As the user gave it."""
    settings: Model
    """What is loaded: the model itself, or the base model of ``checkpoint``."""
    checkpoint: Path | None = None
    """The checkpoint whose weights replace those of the base model."""
    run_folder: Path | None = None
    """The folder of the run that made it, if a run made it."""


def resolve_eval_models(paths: Sequence[str], config: Config) -> list[EvalModel]:
    """The models that ``paths`` name; without any, the model of ``config``.

    Raises:
        ValueError: a local path does not exist, is a run's folder without weights or a checkpoint whose run is not around it, or is
            given twice.
    """
    if not paths:
        path = config.model.path
        return [EvalModel(path, config.model, run_folder=_folder(SavedRun.around(Path(path))))]
    twice = next((path for number, path in enumerate(paths) if path in paths[:number]), None)
    if twice is not None:
        raise ValueError(f"--models must name each model once, but {twice!r} is given twice.")
    for path in paths:
        in_runs = path.count("/") == 1 and Path(path).parent.resolve() == Path(config.output_dir).resolve()
        if in_runs or is_local_path(path):
            _check_exists(path)
    return [_eval_model(path, config.model) for path in paths]


def _check_exists(path: str) -> None:
    """Raises ValueError if there is no such folder, before another is played or ``runs/NAME`` is taken for a hub's OWNER/NAME."""
    try:
        resolve_path(path)
    except ValueError as error:
        raise ValueError(f"model {error}") from error


def _eval_model(name: str, model: Model) -> EvalModel:
    path = Path(name).absolute()
    run = SavedRun.around(path)
    if run is not None and run.folder.samefile(path):
        path = _weights_of(path)
    if not is_checkpoint(path):
        found = str(path.absolute()) if path.is_dir() else name
        settings = replace(model, path=found, lora=Lora(), freeze=())
        return EvalModel(name, settings, run_folder=_folder(run))
    if run is None:
        raise ValueError(
            f"--models {name}: a checkpoint needs the config.json of its run in a folder above it, which names the base model. "
            "Leave it in its run's folder, or export it there: vlmrl export CHECKPOINT --to FOLDER"
        )
    return EvalModel(name, replace(run.model, device=model.device, dtype=model.dtype), path, run.folder)


def _folder(run: SavedRun | None) -> Path | None:
    return None if run is None else run.folder


def _weights_of(run: Path) -> Path:
    newest = newest_weights(run)
    if newest is None:
        raise ValueError(
            f"--models {run}: this run's folder holds neither a model nor a checkpoint. Train with --save-model or with "
            "--checkpoint.every N."
        )
    return newest
