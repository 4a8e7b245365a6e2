"""Folders of images, with or without metadata files, as ``datasets`` knows them by the name ``imagefolder``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import datasets as hf

from vlmrl.data.dataset_rows import Rows
from vlmrl.data.row_images import IMAGE_SUFFIXES
from vlmrl.data.split_files import (
    FORMATS,
    SAME_SPLIT,
    SPLIT_NAMES,
    TRAIN_NAMES,
    base_split,
    escaped,
    files_behind_links,
    files_in,
    load_files,
    rows_of_split,
    words_of_path,
)

METADATA_FILES = {f"metadata{suffix}" for suffix in (".csv", ".jsonl", ".parquet")}


def is_image_folder(folder: Path) -> bool:
    """Whether ``folder`` holds images that no data file lists, or that a metadata file of ``imagefolder`` lists."""
    names = {path.name for path in files_in(folder)}
    suffixes = {Path(name).suffix.lower() for name in names}
    return bool(suffixes & IMAGE_SUFFIXES) and (bool(names & METADATA_FILES) or not suffixes & set(FORMATS))


def load_image_folder(folder: Path, split: str) -> hf.Dataset:
    """A folder of images: the column ``images``, those of its metadata files, and else folders' names as ``answer``."""
    try:
        found = hf.load_dataset_builder("imagefolder", data_dir=escaped(folder)).config.data_files
        files = found.get(base_split(split), [])
        _check_folders(folder, {os.path.relpath(Path(file).parent, folder) for file in files}, split)
        _check_metadata(folder, files, {str(file) for others in found.values() for file in others})
        metadata = [Path(file) for file in files if Path(file).name in METADATA_FILES]
        _check_links(folder, split, METADATA_FILES if metadata else {*METADATA_FILES, *IMAGE_SUFFIXES})
        if metadata:
            return rows_of_split({base_split(split): load_listed_images(metadata, base_split(split))}, split)
        dataset = hf.load_dataset("imagefolder", data_dir=escaped(folder), split=split)
    except Exception as error:  # datasets raises many kinds
        raise ValueError(f"data.path {str(folder)!r} cannot be read as a folder of images: {error}") from error
    if "image" in dataset.column_names:
        dataset = dataset.rename_column("image", "images")
    if isinstance(dataset.features.get("label"), hf.ClassLabel):
        # None: only another split has folders of classes.
        is_named = None not in dataset["label"]
        dataset = dataset.rename_column("label", "answer") if is_named else dataset.remove_columns("label")
    return dataset


def _check_links(folder: Path, split: str, read: set[str]) -> None:
    """Raises ValueError if files of the split with a name or suffix of ``read`` are behind links, which the reader leaves out."""
    own = next((names for names in SAME_SPLIT if base_split(split) in names), {base_split(split)})
    for path in files_behind_links(folder):
        words = words_of_path(str(path.parent.relative_to(folder)))
        if {path.name, path.suffix.lower()} & read and (words & own or not words & SPLIT_NAMES):
            raise ValueError(
                f"{path.parent} is a link to a folder, or in one, and would not be read: put the folder itself there, or list "
                "all images in a metadata file of the folder"
            )


def _check_folders(folder: Path, found: set[str], split: str) -> None:
    """Raises ValueError if images of ``train`` are in folders of other splits: the reader knows ``test``, and not ``Test``."""
    others = sorted(
        name for name in found if (words := words_of_path(name)) & SPLIT_NAMES - TRAIN_NAMES and not words & TRAIN_NAMES
    )
    if others and base_split(split) == "train":
        raise ValueError(
            f"it has images of other splits in {', '.join(others[:10])}, which would be trained on: call its folders train, "
            "validation and test, or name the folder of one split"
        )


def _check_metadata(folder: Path, files: list[str], found: set[str]) -> None:
    """Raises ValueError for metadata above the folders of splits, which the reader leaves out: folders' names would be answers.

    ``files`` are those of the split, ``found`` those of all splits.
    """
    if any(Path(file).name in METADATA_FILES for file in files):
        return
    above = {parent for file in files for parent in Path(file).parents if parent.is_relative_to(folder.resolve())}
    listed = {str(path) for parent in above for name in METADATA_FILES if (path := parent / name).is_file()}
    if unread := sorted(listed - found):
        raise ValueError(
            f"{unread[0]} is in the folder of no split, and would not be read: put a metadata file into the folder of each split, "
            "with the names of its images from there"
        )


def load_listed_images(metadata: list[Path], split: str) -> hf.Dataset:
    """The rows of metadata files. The reader of ``imagefolder`` changes their values more than :func:`load_files` does."""
    if len({path.suffix for path in metadata}) > 1:
        raise ValueError(f"its metadata files must be of one format, but they are {', '.join(map(str, metadata))}")
    parts = []
    for path in metadata:
        part = load_files([path], split)
        names = [name for name in part.column_names if re.search(r"(^|_)file_names?$", name)]
        if not names:
            raise ValueError(f"{path} must have a column file_name, but it has {', '.join(part.column_names)}")
        for name in names:
            located = [_beside(path, value) for value in Rows(part).column(name)]
            column = re.sub(r"_?file_names?$", "", name)
            column = "images" if column in ("", "image") else column
            part = part.remove_columns(name).add_column(column, located)
        parts.append(part)
    return hf.concatenate_datasets(parts)


def _beside(file: Path, name: Any) -> Any:
    """The path of an image in its folder that a metadata file names, or of each of a list."""
    if name is None or isinstance(name, list):
        return name and [_beside(file, each) for each in name]
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{file} names {name[:200]!r}, which is not in its folder")
    return str(file.parent / name)
