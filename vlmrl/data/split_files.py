"""The files of a dataset's split: which of a folder's files they are, and their rows."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from functools import cache
from pathlib import Path

import datasets as hf

from vlmrl.data.parquet_types import check_same_kinds
from vlmrl.data.text_rows import load_texts, reader_errors, stamps_of

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
TRAIN_NAMES = {"train", "training"}
SAME_SPLIT = (TRAIN_NAMES, {"validation", "val", "valid", "dev"}, {"test", "testing", "eval", "evaluation"})
SPLIT_NAMES = set[str]().union(*SAME_SPLIT)


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The files whose names contain the split's name as a word. For ``train``, all files if none names any split."""
    files = [path for path in files_in(folder) if path.suffix in FORMATS]
    words = {file: words_of_path(str(file.relative_to(folder))) for file in files}
    named = [file for file in files if base_split(split).lower() in words[file]]
    if not named and base_split(split) == "train" and not any(words[file] & SPLIT_NAMES for file in files):
        named = files
    if not named:
        has = ", ".join(str(file.relative_to(folder)) for file in files[:10]) or f"no {', '.join(FORMATS)} file"
        raise ValueError(
            f"data.split {split!r} names no file in {folder}, which has: {has}. Set it to a word of the files' names, or name a file."
        )
    first = {file.suffix: str(file.relative_to(folder)) for file in reversed(named)}
    if len(first) > 1:
        has = f"data.path {str(folder)!r} has files of several formats for the split {split!r}, such as {', '.join(first.values())}"
        raise ValueError(f"{has}: move those of other formats elsewhere, or name a file.")
    return named


def load_files(paths: list[Path], split: str) -> hf.Dataset:
    """One split from files of any name."""
    suffixes = {path.suffix for path in paths}
    if not suffixes <= set(FORMATS):
        raise ValueError(f"data.path must be one of {', '.join(FORMATS)} or a folder, but it is {str(paths[0])!r}")
    for path in paths:
        if not (path.is_file() and path.stat().st_size):
            raise ValueError(f"data.path cannot be read: {path} is empty, or it is no regular file, such as a pipe.")
    kind = FORMATS[suffixes.pop()]
    if kind != "parquet":
        return rows_of_split({base_split(split): load_texts(paths, kind)}, split)
    files = {base_split(split): [escaped(path) for path in paths]}
    with reader_errors(paths):
        check_same_kinds(paths)
        stamp = hashlib.blake2b(repr(stamps_of(paths)).encode(), digest_size=16).hexdigest()
        return hf.load_dataset(kind, name=stamp, data_files=files, split=split)


def rows_of_split(splits: dict[str, hf.Dataset], split: str) -> hf.Dataset:
    """The rows that ``split`` names, such as ``train[:100]``."""
    places = hf.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return hf.concatenate_datasets([splits[each.splitname].select([*range(each.from_, each.to)]) for each in places])


def check_only_split(path: Path, split: str) -> None:
    """Raises ValueError for ``test`` of ``rows.jsonl``, which would be all of its rows; ``validation`` of ``validation.jsonl`` is."""
    if (name := base_split(split)) != "train" and name.lower() not in words_of_path(path.name):
        raise ValueError(
            f"data.split {split!r}: {path} has one split, whose name is train: take a part of it, such as train[:100] or "
            "train[100:], or hold rows out with data.held_out."
        )


def base_split(split: str) -> str:
    """The split of a slice: ``train`` of ``train[:100]``."""
    return re.split(r"[\[+]", split)[0]


def words_of_path(path: str) -> set[str]:
    """The words of a path, in lower case: ``geoTrain/val_sft.json`` has `geo`, `train`, `val`, `sft`, `val_sft` and `json`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", path) + re.findall(r"[a-z]+", path.lower())
    parts = re.split(r"[-./]", path.lower())
    return {*parts, *re.split(r"[-_./]", path.lower()), *(word.lower().removesuffix("set") for word in words)}


def files_in(folder: Path) -> list[Path]:
    """All files in ``folder`` and below that are not hidden, sorted.

    Links to folders are followed, but not to a folder that is read already or that ``folder`` is in.
    """
    found: list[Path] = []
    tops, seen = [folder], set[str]()
    whole = Path(os.path.realpath(folder))
    for top in tops:  # links come after all folders that are none
        for parent, folders, names in os.walk(top):
            real = os.path.realpath(parent)
            if real in seen or (seen and whole.is_relative_to(real)):
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            tops += [path for path in (Path(parent, name) for name in folders) if path.is_symlink()]
            found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


def files_behind_links(folder: Path) -> list[Path]:
    """Those of :func:`files_in` that are in a link to a folder, which ``datasets`` leaves out."""

    @cache
    def is_linked(parent: Path) -> bool:
        return parent != folder and (parent.is_symlink() or is_linked(parent.parent))

    return [path for path in files_in(folder) if is_linked(path.parent)]


def escaped(path: Path) -> str:
    """A path for ``datasets``, which reads paths as patterns: ``geo[12].parquet`` would be ``geo1.parquet``."""
    return glob.escape(unchained(path))


def unchained(path: Path) -> str:
    """Raises ValueError for a path with ``::``, of which ``datasets`` would open what stands before it."""
    if "::" in str(path):
        raise ValueError(f"data.path {str(path)!r} must not have '::' in it: rename the file or the folder")
    return str(path)
