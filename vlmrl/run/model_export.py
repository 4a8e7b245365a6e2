"""Export of a run's model in Hugging Face form: from a checkpoint, or from the model that the run saved."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from vlmrl.config import Model
from vlmrl.config.saved import SavedRun, is_checkpoint
from vlmrl.model.loading import LoadedModel, hub_errors, is_model_folder, load_model, on_host
from vlmrl.model.lora import named_adapters, save_adapters
from vlmrl.run.run_folder import newest_weights
from vlmrl.train.checkpoint import load_weights
from vlmrl.utils.output_files import atomic_folder, open_regular

HUB = "hub:"


def export_model(source: Path, to: str, *, adapters: bool = False) -> Path:
    """Write the model of a run or of a checkpoint to the folder ``to``, or upload it to the Hub as ``hub:OWNER/NAME``.

    With ``adapters`` the LoRA adapters alone, as peft reads them; otherwise they are merged into the weights. Returns the folder that
    was exported: a checkpoint, or a saved model.

    Raises:
        ValueError: ``source`` holds no model, ``to`` has files or is in the exported folder, or there are no adapters.
        OSError: the Hub refuses the upload or cannot be reached.
    """
    found = _found_in(source, adapters)
    if to.startswith(HUB):
        with tempfile.TemporaryDirectory(prefix="vlmrl-export-") as scratch:
            _write(found, source, Path(scratch) / "model", adapters)
            _upload(Path(scratch) / "model", to.removeprefix(HUB))
    else:
        target = Path(to)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"--to must be a new or an empty folder, but {to!r} holds files.")
        # Each file that is written there would be one more to copy, until the disk is full.
        if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(found)):
            raise ValueError(f"--to must not be in the folder that is exported, but {to!r} is in {found}.")
        try:
            _write(found, source, target, adapters)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise ValueError(f"--to must be a new or an empty folder, but {to!r} was filled meanwhile.") from error
    return found


def _found_in(source: Path, adapters: bool) -> Path:
    """The checkpoint or the folder in Hugging Face form to export: of a run the one that it wrote last."""
    if is_checkpoint(source) or (is_model_folder(source) and not adapters):
        return source
    what = "adapters" if adapters else "model"
    newest = newest_weights(source, what)
    if newest is None:
        found = f"it holds no {what}, nor a checkpoint" if source.exists() else "there is no such folder"
        raise ValueError(f"{source} must be a run, a checkpoint or a saved model, but {found}.")
    real, folder = Path(os.path.realpath(newest)), Path(os.path.realpath(source))
    if real != folder / newest.relative_to(source):
        raise ValueError(
            f"{newest} must be a folder of the run, but a link leads from there to {real}, whose files would be published: export "
            f"{newest} itself, if you mean it."
        )
    return newest


def _write(found: Path, source: Path, target: Path, adapters: bool) -> None:
    with atomic_folder(target, "--to", replaces=False) as part:
        try:
            _check_own_files(found)
            if not is_checkpoint(found):
                _copy(found, source, part)
                return
        except RecursionError:
            raise ValueError(f"{found} has folders that are nested too deeply for a model: remove them.") from None
        settings, loaded = _trained_model(found)
        if not adapters:
            loaded.save(part)
        elif settings.lora.rank:
            save_adapters(dict(named_adapters(loaded.policy.model)), settings.lora, loaded.path, part)
        else:
            raise ValueError(f"--adapters: the run of {found} has none (model.lora.rank 0). Export its model.")


def _check_own_files(folder: Path) -> None:
    """Raises ValueError if a link or a pipe is in a folder: an export could publish a file of this machine."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"{path} must be a regular file, but it is a link or something else, which is not exported: copy the file there."
            )


def _copy(found: Path, source: Path, part: Path) -> None:
    """Copy the files of the folder ``found`` in ``source``. No link is followed, also if it just replaced a file.

    Raises ValueError if the run replaces the folder meanwhile, as it does its ``best``: the files would be of two models.
    """
    handle = os.open(found, os.O_RDONLY)  # while it is open, no other folder has its inode
    try:
        for path in found.rglob("*"):
            copy = part / path.relative_to(found)
            if path.is_dir() and not path.is_symlink():
                copy.mkdir()
                continue
            with open_regular(path, source) as file, copy.open("wb") as written:
                shutil.copyfileobj(file, written)
    except FileNotFoundError:
        _check_is_same(found, handle)
        raise
    else:
        _check_is_same(found, handle)
    finally:
        os.close(handle)


def _check_is_same(folder: Path, handle: int) -> None:
    if not (folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle))):
        raise ValueError(f"{folder} was replaced while it was copied: export it again.")


def _trained_model(checkpoint: Path) -> tuple[Model, LoadedModel]:
    """The model's settings in the run's ``config.json``, and the model with the checkpoint's weights, on the CPU."""
    run = SavedRun.around(checkpoint)
    if run is None:
        raise ValueError(
            f"checkpoint {checkpoint}: no folder above it has the config.json of its run, which names its model. Export it from the "
            "run's folder."
        )
    models = run.folder.absolute().parent / ".models"
    loaded = load_model(on_host(run.model, models), models, run.seed)
    load_weights(checkpoint, loaded.policy)
    return run.model, loaded


def _upload(folder: Path, name: str) -> None:
    """Upload a folder to the Hub, into a private repository if there is none of that name yet."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except hub_errors() as error:
        raise OSError(f"--to {HUB}{name}: the model cannot be uploaded: {error}") from error
