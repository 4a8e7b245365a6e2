"""The rows of a dataset's split, read one by one or in part, without decoding their images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets as hf

from vlmrl.data.text_rows import JSON, ExactJson

HASHED_ROWS = 64


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
        return row | {name: nested_field(row, name) for name in self._nested}

    def add_nested(self, names: Iterable[str]) -> None:
        """Make fields of columns, such as ``reward_model.ground_truth``, columns of their own, except for those without a value."""
        for name in names:
            root = name.partition(".")[0]
            rows = self.column(root) if root in self.columns and name not in self.columns else []
            if any(nested_field({root: row}, name) is not None for row in rows):
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

    def sample_hash(self, rows: Sequence[int]) -> str:
        """A hash of up to 64 of these rows, spread over them. Files of images count by their names."""
        hasher, last = hashlib.blake2b(digest_size=4), len(rows) - 1
        for place in sorted({number * last // (HASHED_ROWS - 1) for number in range(HASHED_ROWS)} if rows else ()):
            try:
                (row,) = self._table[rows[place]].to_pylist()
                hasher.update(json.dumps(_without_places(row), default=repr).encode())
            except Exception:  # such as text that is no UTF-8
                hasher.update(b"unreadable")
        return hasher.hexdigest()

    def column(self, name: str) -> list[Any]:
        if name in self._nested:
            root = name.partition(".")[0]
            return [nested_field({root: value}, name) for value in self.column(root)]
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
        # Not of messages, which may hold images.
        if isinstance(self._features.get(name), dict | hf.List | hf.LargeList):
            return []
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


def nested_field(row: dict[str, Any], name: str) -> Any:
    """``{"a": {"b": 1}}`` and ``a.b`` -> 1; None where a part is missing."""
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _undecoded(feature: Any) -> Any:
    if feature == JSON or type(feature).__name__ == "Json":  # older versions of datasets have none
        return ExactJson()
    if isinstance(feature, hf.ClassLabel):
        return _ClassName(tuple(feature.names))
    if hasattr(feature, "decode"):  # decoding a PDF, too, opens what its row names
        return replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, hf.List):
        return hf.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, hf.LargeList):
        return hf.LargeList(_undecoded(feature.feature))
    return feature


@dataclass(frozen=True)
class _ClassName:
    """Decodes the number of a class to its name: "B" of the classes A to D, not 1. Its number -1 stands for no class."""

    names: tuple[str, ...]

    def decode_example(self, number: int | None, token_per_repo_id: Any = None) -> str | None:
        return None if number is None or number < 0 else self.names[number]


def _without_places(value: Any) -> Any:
    """A value with the names of files in place of their absolute paths, and a hash in place of an image's bytes."""
    if isinstance(value, dict):
        return {name: _without_places(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_without_places, value))
    if isinstance(value, bytes):
        return hashlib.blake2b(value).hexdigest()
    return value.rpartition("/")[2] if isinstance(value, str) and value.startswith("/") else value
