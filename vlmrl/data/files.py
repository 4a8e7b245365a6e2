"""Loads datasets from the hub, files and folders (of images, too), without decoding their images. Errors say what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets as hf

from vlmrl.config.code import local_data
from vlmrl.data.archives import refuse_links
from vlmrl.data.dataset_rows import Rows
from vlmrl.data.hub_datasets import load_from_hub
from vlmrl.data.image_folders import is_image_folder, load_image_folder
from vlmrl.data.split_files import (
    FORMATS,
    base_split,
    check_only_split,
    files_of_split,
    load_files,
    rows_of_split,
    unchained,
)
from vlmrl.utils.json_files import read_object


@contextmanager
def _progress_in_terminals_only() -> Iterator[None]:
    """In a log, the progress bars of ``datasets`` are lines of noise."""
    if sys.stderr.isatty() or hf.are_progress_bars_disabled():
        yield
        return
    hf.disable_progress_bars()
    try:
        yield
    finally:
        hf.enable_progress_bars()


@_progress_in_terminals_only()
def load_rows(path: str, split: str) -> Rows:
    """The rows of one split, which may be a slice such as ``train[:100]``.

    Raises:
        ValueError: the data does not exist, cannot be read, or has no rows; the message names the file and, if known, the line.
    """
    refuse_links()
    local = local_data(path)
    try:
        dataset = _load_local(local, split) if local else load_from_hub(path, split)
    except RecursionError:
        raise ValueError(f"data.path {path!r} has folders that are nested too deeply: move the files up.") from None
    if not len(dataset):
        raise ValueError(f"data.path {path!r} has no rows in the split {split!r}.")
    return Rows(dataset)


def task_name(path: Path, split: str) -> str:
    """``geo/train`` for both ``geo/train.parquet`` and the split ``train`` of ``geo``."""
    return f"{path.parent.name}/{path.stem}" if path.suffix in FORMATS else f"{path.name}/{split}"


def _load_local(path: Path, split: str) -> hf.Dataset:
    if path.is_file():
        check_only_split(path, split)
        return load_files([path], split)
    if (path / "blobs").is_dir() and len(revisions := sorted(path.glob("snapshots/*"))) > 1:
        has = f"has the rows of {len(revisions)} revisions of a dataset, as the hub's cache keeps them"
        raise ValueError(
            f"data.path {str(path)!r} {has}: name one of them, such as {revisions[-1]}, or its name on the hub."
        )
    if not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        has_images = is_image_folder(path)
        return load_image_folder(path, split) if has_images else load_files(files_of_split(path, split), split)
    saved = _load_saved(path)
    if isinstance(saved, hf.Dataset):
        check_only_split(path, split)
        saved = hf.DatasetDict({base_split(split): saved})
    try:
        return rows_of_split(saved, split)
    except ValueError as error:
        raise ValueError(f"data.split {split!r} is not in {path}, which has: {', '.join(saved)} ({error})") from error


def _load_saved(folder: Path) -> hf.Dataset | hf.DatasetDict:
    """What ``save_to_disk`` wrote. Raises ValueError, also where it names anything but regular files in its folder."""
    try:
        if all((folder / name).is_file() for name in ("state.json", "dataset_info.json")):
            return _load_saved_split(folder, "")
        splits = _saved_list(folder, "dataset_dict.json", "splits")
        return hf.DatasetDict({split: _load_saved_split(folder, split) for split in splits})
    except Exception as error:  # datasets and pyarrow raise many kinds
        raise ValueError(f"data.path {str(folder)!r} cannot be read as a saved dataset: {error}") from error


def _load_saved_split(folder: Path, split: str) -> hf.Dataset:
    """A split, whose description names files in its folder only. ``datasets`` would look at other descriptions than this."""

    def check(file: str) -> None:
        name = Path(split, file)
        if name.is_absolute() or ".." in name.parts or not (folder / name).is_file():
            raise ValueError(f"it names {str(name)[:200]!r}, which is no regular file in it")

    for file in ("dataset_info.json", "state.json"):
        check(file)
    for each in _saved_list(folder, str(Path(split, "state.json")), "_data_files"):
        check(each["filename"])
    rows = hf.Dataset.load_from_disk(unchained(folder / split))
    rows.data.table.validate(full=True)  # a wrong offset would read other memory, or end the process
    return rows


def _saved_list(folder: Path, name: str, key: str) -> list[Any]:
    """A list in a description that ``save_to_disk`` wrote."""
    found = (read_object(folder / name) or {}).get(key)
    if not isinstance(found, list):
        raise ValueError(f"its {name[:200]!r} must be a JSON object of at most 64 MiB with a list {key!r}")
    return found
