"""Loads datasets from the hub, files and folders (of images, too), without decoding their images. Errors say what to do."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets as hf

from vlmrl.config.code import local_data, places
from vlmrl.data.archives import refuse_links
from vlmrl.data.parquet_types import check_same_kinds
from vlmrl.data.row_images import IMAGE_SUFFIXES
from vlmrl.data.text_rows import JSON, ExactJson, load_texts, reader_errors, stamps_of
from vlmrl.utils.folders import escaped, files_behind_links, files_in, unchained
from vlmrl.utils.json_files import read_object

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_METADATA = {f"metadata{suffix}" for suffix in (".csv", ".jsonl", ".parquet")}
_TRAIN = {"train", "training"}
_SPLIT_NAMES = {"train", "validation", "val", "valid", "dev", "test", "training", "testing", "eval", "evaluation"}


class Rows:
    """The rows of one split by index. Images, nested ones too, stay encoded as ``{"bytes": ..., "path": ...}``."""

    def __init__(self, dataset: hf.Dataset) -> None:
        self.columns: list[str] = dataset.column_names
        self._table = dataset.with_format("arrow")
        self._features = hf.Features({name: _undecoded(feature) for name, feature in dataset.features.items()})
        self._nested: list[str] = []
        self._head = self._table[:1]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._features.decode_example(self._table[index].to_pylist()[0])
        return row | {name: _field(row, name) for name in self._nested}

    def add_nested(self, names: Iterable[str]) -> None:
        """Make fields of columns, such as ``reward_model.ground_truth``, columns of their own, except for those without a value."""
        for name in names:
            root = name.partition(".")[0]
            rows = self.column(root) if root in self.columns and name not in self.columns else []
            if any(_field({root: row}, name) is not None for row in rows):
                self._nested.append(name)
                self.columns.append(name)

    def take(self, indices: list[int]) -> list[dict[str, Any]]:
        """Rows by index, in this order; several times faster than reading them one by one."""
        return list(map(self._features.decode_example, self._table[indices].to_pylist())) if indices else []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._table.iter(batch_size=1000):
            yield from map(self._features.decode_example, part.to_pylist())

    def digest(self) -> str:
        """A hash of all content, independent of the file it came from."""
        hasher = hashlib.blake2b(repr(self._features).encode(), digest_size=8)
        for part in self._table.data.table.to_batches():
            for column in part.columns:
                hasher.update(f"{column.offset},{len(column)}".encode())
                for buffer in filter(None, column.buffers()):
                    hasher.update(buffer)
        return hasher.hexdigest()

    def column(self, name: str) -> list[Any]:
        if name in self._nested:
            root = name.partition(".")[0]
            return [_field({root: value}, name) for value in self.column(root)]
        return self._features.decode_column(self._table[name].to_pylist(), name)

    def first(self, name: str) -> Any:
        """The first row's value of a column that is not nested, or None if it cannot be read."""
        try:
            return self._features.decode_column(self._head[name].to_pylist(), name)[0]
        except Exception:  # such as text that is no UTF-8, or a date after the year 9999
            return None

    def declares_images(self, name: str) -> bool:
        """Whether the dataset says that this column, which is not nested, holds images, or lists of them."""
        feature = self._features.get(name)
        return isinstance(getattr(feature, "feature", feature), hf.Image)

    def empty_texts(self, name: str) -> list[int]:
        """The rows whose text in this column is empty or blank."""
        try:
            values = self.column(name)
        except UnicodeDecodeError:  # no UTF-8: its rows are bad ones
            return []
        return [row for row, value in enumerate(values) if isinstance(value, str) and not value.strip()]

    def whole_floats(self, name: str) -> list[int]:
        """The rows with a float such as 3.0 in this column, which the reader of parquet may have made of a whole number."""
        if not isinstance(self._features.get(name), hf.Value) or "float" not in self._features[name].dtype:
            return []
        return [row for row, number in enumerate(self.column(name)) if number is not None and number.is_integer()]


def _field(row: dict[str, Any], name: str) -> Any:
    """``{"a": {"b": 1}}`` and ``a.b`` -> 1; None where a part is missing."""
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


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
        dataset = _load_local(local, split) if local else _load_hub(path, split)
    except RecursionError:
        raise ValueError(f"data.path {path!r} has folders that are nested too deeply: move the files up.") from None
    if not len(dataset):
        raise ValueError(f"data.path {path!r} has no rows in the split {split!r}.")
    return Rows(dataset)


def task_name(path: Path, split: str) -> str:
    """``geo/train`` for both ``geo/train.parquet`` and the split ``train`` of ``geo``."""
    return f"{path.parent.name}/{path.stem}" if path.suffix in FORMATS else f"{path.name}/{split}"


def _load_hub(path: str, split: str) -> hf.Dataset:
    try:
        builder = hf.load_dataset_builder(path)
        own = builder.config.data_files or {}
        names = {kind.__name__ for kind in type(builder).__mro__}
        if "WebDataset" in names and not _declares_types(path, builder):
            return hf.load_dataset(path, split=split, features=_types_of_samples(path, split))
        if "ImageFolder" in names and _base(split) in own and not _declares_types(path, builder):
            return _load_hub_images(path, split, own)
        kind = next((name.lower() for name in ("Json", "Csv", "Parquet") if name in names), "")
        is_read = kind and (kind != "csv" or _has_no_options(builder.config))
        if not is_read or _base(split) not in own or _declares_types(path, builder):
            return hf.load_dataset(path, split=split)
        manager = hf.DownloadManager()
        needed = [_base(split)]
        if kind == "parquet":  # all splits get the types of the first one
            needed.insert(0, str(next(iter(own))))
        files = [
            Path(file)
            for name in dict.fromkeys(needed)
            for file in manager.iter_files(manager.download_and_extract(own[name]))
        ]
        if kind == "parquet":
            with reader_errors(files):
                check_same_kinds(files)
            return hf.load_dataset(path, split=split)
        return _rows_of_split({_base(split): load_texts(files, kind)}, split)
    except OSError as error:  # not found, offline, not allowed: all of them are OSErrors
        looked = ", ".join(map(str, places(path)))
        message = f"data.path {path!r} is nothing local (looked at: {looked}), and the hub says: {error}"
        raise ValueError(message) from error


def _load_hub_images(path: str, split: str, own: Mapping[Any, Any]) -> hf.Dataset:
    """A folder of images of the hub, with the columns of ``datasets``. The values of its metadata files are as they are written."""
    # Also for its cache, which is read where the hub is out of reach.
    read = hf.load_dataset(path, split=split)
    manager = hf.DownloadManager()
    parts = {}
    for name in {part.partition("[")[0] for part in split.split("+")}:
        files = map(Path, manager.iter_files(manager.download_and_extract(own[name])))
        metadata = [file for file in files if file.name in _METADATA]
        if not metadata:
            return read
        parts[name] = _listed_images(metadata, name)
    rows = _rows_of_split(parts, split)
    names = rows.column_names
    is_renamed = "images" in names and "image" not in names and "images" not in read.column_names
    return rows.rename_column("images", "image") if is_renamed else rows


def _types_of_samples(path: str, split: str) -> hf.Features | None:
    """Of a WebDataset, with JSON as it is written: ``datasets`` gives it the types of the first five samples, and 1.5 becomes 1."""
    types = hf.load_dataset(path, split=_base(split), streaming=True).features
    exact = {name: hf.Json() for name in types if name.rpartition(".")[2] == "json"}
    return hf.Features({**types, **exact}) if exact else None


def _declares_types(path: str, builder: hf.DatasetBuilder) -> bool:
    """Whether a dataset names its columns' types. If it was loaded before, its builder has those that `datasets` found then."""
    if builder.info.features is None:
        return False
    with TemporaryDirectory() as empty:
        return hf.load_dataset_builder(path, cache_dir=empty).info.features is not None


def _has_no_options(config: Any) -> bool:
    """Whether a CSV dataset of the hub is read as any CSV file, and not with another separator, for example."""
    return bool(config.pd_read_csv_kwargs == type(config)().pd_read_csv_kwargs)


def _load_local(path: Path, split: str) -> hf.Dataset:
    if path.is_file():
        _check_only_split(path, split)
        return _load_files([path], split)
    if (path / "blobs").is_dir() and len(revisions := sorted(path.glob("snapshots/*"))) > 1:
        has = f"has the rows of {len(revisions)} revisions of a dataset, as the hub's cache keeps them"
        raise ValueError(
            f"data.path {str(path)!r} {has}: name one of them, such as {revisions[-1]}, or its name on the hub."
        )
    if not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        has_images = _is_image_folder(path)
        return _load_images(path, split) if has_images else _load_files(_files_of_split(path, split), split)
    saved = _load_saved(path)
    if isinstance(saved, hf.Dataset):
        _check_only_split(path, split)
        saved = hf.DatasetDict({_base(split): saved})
    try:
        return _rows_of_split(saved, split)
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


def _check_only_split(path: Path, split: str) -> None:
    """Raises ValueError for ``test`` of ``rows.jsonl``, which would be all of its rows; ``validation`` of ``validation.jsonl`` is."""
    if (name := _base(split)) != "train" and name.lower() not in _words(path.name):
        raise ValueError(
            f"data.split {split!r}: {path} has one split, whose name is train: take a part of it, such as train[:100] or "
            "train[100:], or hold rows out with data.held_out."
        )


def _rows_of_split(splits: dict[str, hf.Dataset], split: str) -> hf.Dataset:
    """The rows that ``split`` names, such as ``train[:100]``."""
    places = hf.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return hf.concatenate_datasets([splits[each.splitname].select([*range(each.from_, each.to)]) for each in places])


def _is_image_folder(folder: Path) -> bool:
    """Whether ``folder`` holds images that no data file lists, or that a metadata file of ``imagefolder`` lists."""
    names = {path.name for path in files_in(folder)}
    suffixes = {Path(name).suffix.lower() for name in names}
    return bool(suffixes & IMAGE_SUFFIXES) and (bool(names & _METADATA) or not suffixes & set(FORMATS))


def _load_images(folder: Path, split: str) -> hf.Dataset:
    """A folder of images: the column ``images``, those of its metadata files, and else folders' names as ``answer``."""
    try:
        found = hf.load_dataset_builder("imagefolder", data_dir=escaped(folder)).config.data_files
        files = found.get(_base(split), [])
        _check_folders(folder, {os.path.relpath(Path(file).parent, folder) for file in files}, split)
        _check_metadata(folder, files, {str(file) for others in found.values() for file in others})
        metadata = [Path(file) for file in files if Path(file).name in _METADATA]
        unread = _METADATA if metadata else {*_METADATA, *IMAGE_SUFFIXES}
        if linked := [path for path in files_behind_links(folder) if {path.name, path.suffix.lower()} & unread]:
            raise ValueError(
                f"{linked[0].parent} is a link to a folder, or in one, and would not be read: put the folder itself there, or list "
                "all images in a metadata file of the folder"
            )
        if metadata:
            return _rows_of_split({_base(split): _listed_images(metadata, _base(split))}, split)
        dataset = hf.load_dataset("imagefolder", data_dir=escaped(folder), split=split)
    except Exception as error:  # datasets raises many kinds
        raise ValueError(f"data.path {str(folder)!r} cannot be read as a folder of images: {error}") from error
    if "image" in dataset.column_names:
        dataset = dataset.rename_column("image", "images")
    label = dataset.features.get("label")
    if isinstance(label, hf.ClassLabel):
        numbers = dataset["label"]
        dataset = dataset.remove_columns("label")
        # None: only another split has folders of classes.
        if None not in numbers:
            dataset = dataset.add_column("answer", [label.names[number] for number in numbers])
    return dataset


def _check_folders(folder: Path, found: set[str], split: str) -> None:
    """Raises ValueError if images of ``train`` are in folders of other splits: the reader knows ``test``, and not ``Test``."""
    others = sorted(name for name in found if (words := _words(name)) & _SPLIT_NAMES - _TRAIN and not words & _TRAIN)
    if others and _base(split) == "train":
        raise ValueError(
            f"it has images of other splits in {', '.join(others[:10])}, which would be trained on: call its folders train, "
            "validation and test, or name the folder of one split"
        )


def _check_metadata(folder: Path, files: list[str], found: set[str]) -> None:
    """Raises ValueError for metadata above the folders of splits, which the reader leaves out: folders' names would be answers.

    ``files`` are those of the split, ``found`` those of all splits.
    """
    if any(Path(file).name in _METADATA for file in files):
        return
    above = {parent for file in files for parent in Path(file).parents if parent.is_relative_to(folder.resolve())}
    listed = {str(path) for parent in above for name in _METADATA if (path := parent / name).is_file()}
    if unread := sorted(listed - found):
        raise ValueError(
            f"{unread[0]} is in the folder of no split, and would not be read: put a metadata file into the folder of each split, "
            "with the names of its images from there"
        )


def _listed_images(metadata: list[Path], split: str) -> hf.Dataset:
    """The rows of metadata files. The reader of ``imagefolder`` changes their values more than :func:`_load_files` does."""
    if len({path.suffix for path in metadata}) > 1:
        raise ValueError(f"its metadata files must be of one format, but they are {', '.join(map(str, metadata))}")
    parts = []
    for path in metadata:
        part = _load_files([path], split)
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


def _load_files(paths: list[Path], split: str) -> hf.Dataset:
    """One split from files of any name."""
    suffixes = {path.suffix for path in paths}
    if not suffixes <= set(FORMATS):
        raise ValueError(f"data.path must be one of {', '.join(FORMATS)} or a folder, but it is {str(paths[0])!r}")
    for path in paths:
        if not (path.is_file() and path.stat().st_size):
            raise ValueError(f"data.path cannot be read: {path} is empty, or it is no regular file, such as a pipe.")
    kind = FORMATS[suffixes.pop()]
    if kind != "parquet":
        return _rows_of_split({_base(split): load_texts(paths, kind)}, split)
    files = {_base(split): [escaped(path) for path in paths]}
    with reader_errors(paths):
        check_same_kinds(paths)
        stamp = hashlib.blake2b(repr(stamps_of(paths)).encode(), digest_size=16).hexdigest()
        return hf.load_dataset(kind, name=stamp, data_files=files, split=split)


def _words(path: str) -> set[str]:
    """The words of a path, in lower case: ``geoTrain/val2014.json`` has `geo`, `train`, `val`, `val2014` and `json`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", path) + re.findall(r"[a-z]+", path.lower())
    return {*re.split(r"[-_./]", path.lower()), *(word.lower().removesuffix("set") for word in words)}


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The files whose names contain the split's name as a word. For ``train``, all files if none names any split."""
    visible = [path for path in files_in(folder) if not any(part[0] == "." for part in path.relative_to(folder).parts)]
    files = [path for path in visible if path.suffix in FORMATS]
    words = {file: _words(str(file.relative_to(folder))) for file in files}
    named = [file for file in files if _base(split).lower() in words[file]]
    if not named and _base(split) == "train" and not any(words[file] & _SPLIT_NAMES for file in files):
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


def _base(split: str) -> str:
    return re.split(r"[\[+]", split)[0]


def _undecoded(feature: Any) -> Any:
    if feature == JSON or type(feature).__name__ == "Json":  # older versions of datasets have none
        return ExactJson()
    if hasattr(feature, "decode"):  # decoding a PDF, too, opens what its row names
        return replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, hf.List):
        return hf.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, hf.LargeList):
        return hf.LargeList(_undecoded(feature.feature))
    return feature
