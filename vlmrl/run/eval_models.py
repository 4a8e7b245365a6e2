"""The models of an evaluation: a Hugging Face folder or name, a run's folder, or one of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmrl.config import Config, Lora, Model
from vlmrl.config.saved import SavedRun, is_checkpoint
from vlmrl.run.run_folder import newest_weights


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
        ValueError: a path is a run's folder that holds no weights, a checkpoint whose run is not around it, or given twice.
    """
    if not paths:
        path = config.model.path
        return [EvalModel(path, config.model, run_folder=_folder(SavedRun.around(Path(path))))]
    twice = next((path for number, path in enumerate(paths) if path in paths[:number]), None)
    if twice is not None:
        raise ValueError(f"--models must name each model once, but {twice!r} is given twice.")
    return [_resolve(path, config.model) for path in paths]


def _resolve(name: str, model: Model) -> EvalModel:
    path, run = Path(name), SavedRun.around(Path(name))
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
