"""Datasets of the hub. Text files and metadata are read as :mod:`split_files` reads them, since ``datasets`` changes some values."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets as hf
import pyarrow as pa
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from vlmrl.config.code import places
from vlmrl.data.image_folders import METADATA_FILES, load_listed_images
from vlmrl.data.parquet_types import check_same_kinds
from vlmrl.data.split_files import base_split, rows_of_split
from vlmrl.data.text_rows import load_texts, reader_errors

CHANGED_IN_CACHE = ("csv", "json", "imagefolder", "webdataset")
"""Forms of datasets in whose cache `datasets` keeps other values than their files have."""


_loading = threading.Lock()  # the setting is one of the whole process


@contextmanager
def _only_declared_types() -> Iterator[None]:
    """Without the types that the hub's viewer finds in the files of nearly all datasets: they would seem to be declared."""
    with _loading:
        given, hf.config.USE_PARQUET_EXPORT = hf.config.USE_PARQUET_EXPORT, False
        try:
            yield
        finally:
            hf.config.USE_PARQUET_EXPORT = given


@_only_declared_types()
def load_from_hub(path: str, split: str) -> hf.Dataset:
    """One split of a dataset, such as ``somebody/data``, or ``openai/gsm8k:main`` for one of several configurations.

    Raises ValueError if the hub does not have it, or is out of reach and its cache does not.
    """
    dataset, _, configuration = path.partition(":")
    try:
        return _load((dataset, configuration) if configuration else (path,), split)
    except OSError as error:  # not found, offline, not allowed: all of them are OSErrors
        looked = ", ".join(map(str, places(path)))
        message = f"data.path {path!r} is nothing local (looked at: {looked}), and the hub says: {error}"
        raise ValueError(message) from error


def _builder(name: tuple[str, ...]) -> hf.DatasetBuilder:
    """Raises ValueError, with their names, if the dataset has several configurations and none is named."""
    try:
        return hf.load_dataset_builder(*name)
    except ValueError:
        found = hf.get_dataset_config_names(name[0]) if len(name) == 1 else []
        if len(found) < 2:
            raise
        has = f"data.path {name[0]!r} has several configurations ({', '.join(found):.500})"
        raise ValueError(f"{has}: add the name of one, such as {name[0]}:{found[0]}.") from None


def _load(name: tuple[str, ...], split: str) -> hf.Dataset:
    """A split of the dataset with this ``name`` and configuration, if there are several."""
    builder = _builder(name)
    # Where the hub is out of reach, it is that of the cache of `datasets`.
    if type(builder).__name__ == "Cache" and builder.info.builder_name in CHANGED_IN_CACHE:
        return _load((_downloaded(name[0], builder.hash), *name[1:]), split)
    own = builder.config.data_files or {}
    names = {kind.__name__ for kind in type(builder).__mro__}
    if "WebDataset" in names:
        return _load_samples(name, split, builder.info.features if _declares_types(name, builder) else None)
    if "ImageFolder" in names:
        return _load_hub_images(name, split, own, _declares_types(name, builder))
    kind = next((name.lower() for name in ("Json", "Csv", "Parquet") if name in names), "")
    is_read = kind and (kind != "csv" or _has_no_options(builder.config))
    if not is_read or base_split(split) not in own or _declares_types(name, builder):
        return hf.load_dataset(*name, split=split)
    manager = hf.DownloadManager()
    needed = [base_split(split)]
    if kind == "parquet":  # all splits get the types of the first one
        needed.insert(0, str(next(iter(own))))
    files = [
        Path(file)
        for part in dict.fromkeys(needed)
        for file in manager.iter_files(manager.download_and_extract(own[part]))
    ]
    if kind == "parquet":
        with reader_errors(files):
            check_same_kinds(files)
        return hf.load_dataset(*name, split=split)
    return rows_of_split({base_split(split): load_texts(files, kind)}, split)


def _load_hub_images(name: tuple[str, ...], split: str, own: Mapping[Any, Any], is_declared: bool) -> hf.Dataset:
    """A folder of images of the hub, with the columns of ``datasets``. The values of its metadata files are as they are written,
    unless it declares their types."""
    # Also for its cache, which is read where the hub is out of reach.
    read = hf.load_dataset(*name, split=split)
    if is_declared or base_split(split) not in own:
        return _without_archives(read, own)
    manager = hf.DownloadManager()
    parts = {}
    for part in {each.partition("[")[0] for each in split.split("+")}:
        files = map(Path, manager.iter_files(manager.download_and_extract(own[part])))
        metadata = [file for file in files if file.name in METADATA_FILES]
        if not metadata:
            return _without_archives(read, own)
        parts[part] = load_listed_images(metadata, part)
    rows = rows_of_split(parts, split)
    names = rows.column_names
    is_renamed = "images" in names and "image" not in names and "images" not in read.column_names
    return rows.rename_column("images", "image") if is_renamed else rows


def _without_archives(rows: hf.Dataset, own: Mapping[Any, Any]) -> hf.Dataset:
    """The rows with paths of unpacked images, if files of the dataset are archives: only ``datasets`` opens ``zip://0.png::a.zip``."""
    manager = hf.DownloadManager()
    archives = [manager.download(file) for files in own.values() for file in files if Path(file).suffix == ".zip"]
    if not archives:
        return rows
    with_files = partial(_with_files, {archive: manager.extract(archive) for archive in archives})
    return rows.with_format("arrow").map(with_files, batched=True, features=rows.features).with_format(None)


def _with_files(folders: Mapping[str, str], table: pa.Table) -> pa.Table:
    """The table with paths into the folders of the archives."""

    def unpacked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: unpacked(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return list(map(unpacked, value))
        if isinstance(value, str) and value.startswith("zip://"):
            inside, _, archive = value.removeprefix("zip://").partition("::")
            return str(Path(folders[archive], inside))
        return value

    columns = [pa.array(unpacked(column.to_pylist()), column.type) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _load_samples(name: tuple[str, ...], split: str, declared: hf.Features | None) -> hf.Dataset:
    """A WebDataset. Its images are read as bytes: in place of one whose name a file of the working directory has, too, ``datasets``
    would keep the name alone."""
    types = declared or _types_of_samples(name, split)
    images = {field: kind for field, kind in types.items() if isinstance(kind, hf.Image)}
    read = hf.Features({**types, **dict.fromkeys(images, hf.Value("binary"))})
    rows = hf.load_dataset(*name, split=split, features=read)
    for field, kind in images.items():
        rows = rows.cast_column(field, kind)
    return rows


def _types_of_samples(name: tuple[str, ...], split: str) -> hf.Features:
    """Of a WebDataset, with JSON as it is written: ``datasets`` gives it the types of the first five samples, and 1.5 becomes 1."""
    types = hf.load_dataset(*name, split=base_split(split), streaming=True).features
    return hf.Features({**types, **{field: hf.Json() for field in types if field.rpartition(".")[2] == "json"}})


def _downloaded(path: str, commit: str) -> str:
    """The folder with the files of a dataset that were downloaded earlier. Raises ValueError if there is none."""
    try:
        return snapshot_download(path, repo_type="dataset", revision=commit, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"data.path {path!r} must be in the cache of the hub where the hub is out of reach, and it is only in that of `datasets`, "
            f"which has other values than the files: run `hf download --repo-type dataset {path}` where the hub is in reach."
        ) from error


def _declares_types(name: tuple[str, ...], builder: hf.DatasetBuilder) -> bool:
    """Whether a dataset names its columns' types. If it was loaded before, its builder has those that `datasets` found then."""
    if builder.info.features is None:
        return False
    with TemporaryDirectory() as empty:
        return hf.load_dataset_builder(*name, cache_dir=empty).info.features is not None


def _has_no_options(config: Any) -> bool:
    """Whether a CSV dataset of the hub is read as any CSV file, and not with another separator, for example."""
    return bool(config.pd_read_csv_kwargs == type(config)().pd_read_csv_kwargs)
