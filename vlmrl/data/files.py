"""Loads datasets from the hub, files and folders (of images, too), without decoding their images. Errors say what to do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import datasets as hf
import pyarrow
import pyarrow.compute

from vlmrl.config.code import local_data, places
from vlmrl.data.dataset_rows import Rows, is_json
from vlmrl.utils.json_files import finite_float, read_object

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
READER_OPTIONS = {"csv": {"keep_default_na": False, "na_values": [""]}}
"""For the readers of ``datasets``. Texts such as NA, None and null of CSV would be empty cells."""
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"}
_METADATA = {f"metadata{suffix}" for suffix in (".csv", ".jsonl", ".parquet")}
_TYPES = {"string": (str,), "int64": (int,), "float64": (int, float), "bool": (bool,)}
"""The types of JSON's values by those that ``datasets`` gives columns."""
_SPLIT_NAMES = {"train", "validation", "val", "valid", "dev", "test"}


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
        dataset = hf.load_dataset(path, split=split)
        if dataset.builder_name != "json":
            return dataset
        builder = hf.load_dataset_builder(path)
        if "Json" not in [kind.__name__ for kind in type(builder).__mro__]:
            return dataset
        files = hf.DownloadManager().download(builder.config.data_files[_base(split)])  # it has them already
        return _with_texts(dataset, list(map(Path, files)), split)
    except OSError as error:  # not found, offline, not allowed: all of them are OSErrors
        looked = ", ".join(map(str, places(path)))
        message = f"data.path {path!r} is nothing local (looked at: {looked}), and the hub says: {error}"
        raise ValueError(message) from error


def _load_local(path: Path, split: str) -> hf.Dataset:
    if path.is_file():
        _check_only_split(path, split)
        return _load_files([path], split)
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
        for split in (read_object(folder / "dataset_dict.json") or {"splits": [""]})["splits"]:
            state = read_object(folder / split / "state.json") or {"_data_files": [{"filename": "state.json"}]}
            for file in ("dataset_info.json", *(each["filename"] for each in state["_data_files"])):
                name = Path(split, file)
                if name.is_absolute() or ".." in name.parts or not (folder / name).is_file():
                    raise ValueError(f"it names {str(name)[:200]!r}, which is no regular file in it")
        return hf.load_from_disk(str(folder))
    except Exception as error:  # datasets and pyarrow raise many kinds
        raise ValueError(f"data.path {str(folder)!r} cannot be read as a saved dataset: {error}") from error


def _check_only_split(path: Path, split: str) -> None:
    """Raises ValueError for ``test`` of ``rows.jsonl``, which would be all of its rows; ``validation`` of ``validation.jsonl`` is."""
    if (name := _base(split)) != "train" and name not in re.split(r"[-_.]", path.name):
        raise ValueError(
            f"data.split {split!r}: {path} has one split, whose name is train: take a part of it, such as train[:100] or "
            "train[100:], or hold rows out with data.held_out."
        )


def _rows_of_split(splits: dict[str, hf.Dataset], split: str) -> hf.Dataset:
    """The rows that ``split`` names, such as ``train[:100]``."""
    places = hf.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return hf.concatenate_datasets([splits[place.splitname].select(range(place.from_, place.to)) for place in places])


def _is_image_folder(folder: Path) -> bool:
    """Whether ``folder`` holds images that no data file lists, or that a metadata file of ``imagefolder`` lists."""
    names = {path.name for path in folder.rglob("*")}
    suffixes = {Path(name).suffix.lower() for name in names}
    return bool(suffixes & IMAGES) and (bool(names & _METADATA) or not suffixes & set(FORMATS))


def _load_images(folder: Path, split: str) -> hf.Dataset:
    """A folder of images: the column ``images``, those of its metadata files, and else folders' names as ``answer``."""
    try:
        files = hf.load_dataset_builder("imagefolder", data_dir=str(folder)).config.data_files.get(_base(split), [])
        metadata = [Path(file) for file in files if Path(file).name in _METADATA]
        if metadata:
            return _rows_of_split({_base(split): _listed_images(metadata, _base(split))}, split)
        dataset = hf.load_dataset("imagefolder", data_dir=str(folder), split=split)
    except Exception as error:  # datasets raises many kinds
        raise ValueError(f"data.path {str(folder)!r} cannot be read as a folder of images: {error}") from error
    if "image" in dataset.column_names:
        dataset = dataset.rename_column("image", "images")
    label = dataset.features.get("label")
    if isinstance(label, hf.ClassLabel):
        answers = [label.names[number] for number in dataset["label"]]
        dataset = dataset.remove_columns("label").add_column("answer", answers)
    return dataset


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
            located = [_beside(path, value) for value in part[name]]
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
    files = {_base(split): [str(path) for path in paths]}
    kind = FORMATS[suffixes.pop()]
    try:
        dataset = hf.load_dataset(kind, data_files=files, split=split, **READER_OPTIONS.get(kind, {}))
        return _with_texts(dataset, paths, split) if kind == "json" else dataset
    except Exception as error:  # datasets raises many kinds: StopIteration, ArrowInvalid, DatasetGenerationError
        raise ValueError(f"data.path cannot be read: {_describe_error(paths, error)}") from error


def _with_texts(dataset: hf.Dataset, paths: list[Path], split: str) -> hf.Dataset:
    """The rows of JSON files, read again where the reader of ``datasets`` changes texts.

    Times were texts like 2020-01-01, since JSON has none. Where values have several types, such as contents that are texts or lists
    of parts, that reader takes a text for JSON, so that the response "4" is a number, and cuts numbers to ten digits. Where the first
    file's first 10 MiB have one type, it makes all later values of that type: the text "007" is a 7 after a number. A whole number
    within a list or an object, such as the arguments of a call, is a float if the same place of another row has one.
    """
    cast = _cast_columns(dataset.features, paths) | _columns_with_whole_floats(dataset)
    if not cast and not _changes_texts(dataset):
        return dataset
    exact = dict.fromkeys(cast, hf.Json()) if cast else {}
    features = hf.Features(_times_as_texts(dict(dataset.features)) | exact)
    stamps = [path.stat().st_mtime_ns for path in paths]  # for the cache of `datasets`, which does not read the files
    given = {"paths": tuple(map(str, paths)), "stamps": tuple(stamps), "features": features}
    return _rows_of_split({_base(split): hf.Dataset.from_generator(_json_rows, features, gen_kwargs=given)}, split)


def _cast_columns(features: dict[str, Any], paths: list[Path]) -> set[str]:
    """The columns with values of another type than their features have."""
    if len(paths) == 1 and paths[0].stat().st_size <= 10 * 2**20:  # the reader has seen all of it
        return set()
    found: set[str] = set()
    try:
        for row in filter(lambda row: isinstance(row, dict), chain.from_iterable(map(_parsed, paths))):
            found.update(name for name, feature in features.items() if not _fits(row.get(name), feature))
    except (ValueError, RecursionError):  # one object of many lines, or no UTF-8
        return set()
    return found


def _columns_with_whole_floats(dataset: hf.Dataset) -> set[str]:
    """The columns of lists or objects with a float such as 3.0. Those of plain floats are warned of: :meth:`Rows.whole_floats`."""
    nested = [name for name, feature in dataset.features.items() if not isinstance(feature, hf.Value)]
    return {name for name in nested if any(map(_has_whole_float, dataset.data.column(name).chunks))}


def _has_whole_float(array: pyarrow.Array) -> bool:
    if pyarrow.types.is_struct(array.type):
        return any(map(_has_whole_float, array.flatten()))
    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        return _has_whole_float(array.flatten())
    if not pyarrow.types.is_floating(array.type):
        return False
    return bool(pyarrow.compute.any(pyarrow.compute.equal(array, pyarrow.compute.floor(array))).as_py())


def _fits(value: Any, feature: Any) -> bool:
    if value is None:
        return True
    if isinstance(feature, hf.Value):
        return type(value) in _TYPES.get(feature.dtype, (type(value),))
    if isinstance(feature, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), inner) for name, inner in feature.items())
    if isinstance(feature, hf.List):
        return isinstance(value, list) and all(_fits(each, feature.feature) for each in value)
    return True


def _changes_texts(dataset: hf.Dataset) -> bool:
    """Whether the dataset has a column or a field that :func:`_with_texts` reads again."""
    features = dict(dataset.features)
    return _times_as_texts(features) != features or _holds_json(features)


def _times_as_texts(feature: Any) -> Any:
    if isinstance(feature, hf.Value):
        return hf.Value("string") if re.match(r"timestamp|date|time|duration", feature.dtype) else feature
    if isinstance(feature, dict):
        return {name: _times_as_texts(inner) for name, inner in feature.items()}
    if isinstance(feature, hf.List):
        return hf.List(_times_as_texts(feature.feature), length=feature.length)
    return feature


def _holds_json(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_holds_json, feature.values()))
    return _holds_json(feature.feature) if isinstance(feature, hf.List) else is_json(feature)


def _json_rows(paths: tuple[str, ...], stamps: tuple[int, ...], features: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from (_written(row, features) for row in _parsed(Path(path)))


def _parsed(path: Path) -> Iterator[Any]:
    """The rows of a file with a JSON object a line, or with one list of them."""
    with path.open(encoding="utf-8-sig") as lines:
        first = lines.read(1)
        lines.seek(0)
        yield from json.load(lines) if first == "[" else map(json.loads, filter(str.strip, lines))


def _written(value: Any, feature: Any) -> Any:
    """The value with its parts of the kind ``Json`` as JSON, texts too."""
    if value is None or isinstance(feature, hf.Value):
        return value
    if isinstance(feature, dict):
        return {name: _written(value.get(name), inner) for name, inner in feature.items()}
    return [_written(each, feature.feature) for each in value] if isinstance(feature, hf.List) else json.dumps(value)


def _describe_error(paths: list[Path], error: BaseException) -> str:
    """The broken file and the place in it; ``error`` is its reader's."""
    for path in paths:
        if path.stat().st_size < 100 and path.read_bytes().strip() in (b"", b"[]"):
            return f"{path} is empty"
        if path.suffix == ".jsonl" and (problem := _bad_line(path)):
            return f"{path}, {problem}"
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{', '.join(map(str, paths))}: {error}"


def _bad_line(path: Path) -> str | None:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                json.loads(line or "{}", parse_float=finite_float)
            except (ValueError, RecursionError) as error:
                return f"line {number} is not JSON ({error}): {line.strip()[:80]!r}"
    return None


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The files whose names contain the split's name as a word. For ``train``, all files if none names any split."""
    visible = [path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts)]
    files = next((found for suffix in FORMATS if (found := sorted(p for p in visible if p.suffix == suffix))), [])
    words = {file: set(re.split(r"[-_./]", str(file.relative_to(folder)))) for file in files}
    named = [file for file in files if _base(split) in words[file]]
    if not named and _base(split) == "train" and not any(words[file] & _SPLIT_NAMES for file in files):
        named = files
    if not named:
        has = ", ".join(str(file.relative_to(folder)) for file in files[:10]) or f"no {', '.join(FORMATS)} file"
        raise ValueError(f"data.split {split!r} names no file in {folder}, which has: {has}")
    return named


def _base(split: str) -> str:
    return re.split(r"[\[+]", split)[0]
