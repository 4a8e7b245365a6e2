"""The rows of a dataset by index, with their values as they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import datasets as hf
import pyarrow
import pyarrow.compute

from vlmrl.data.row_images import json_as_written


@dataclass(frozen=True)
class ExactJson:
    """In place of the ``Json`` of ``datasets``, which rounds numbers: 57.29 becomes 57.290000000000006."""

    def decode_example(self, written: str, token_per_repo_id: Any = None) -> Any:
        return json_as_written(written)


class Rows:
    """The rows of one split by index. Images, nested ones too, stay encoded as ``{"bytes": ..., "path": ...}``."""

    def __init__(self, dataset: hf.Dataset) -> None:
        self.columns: list[str] = dataset.column_names
        self._table = dataset.with_format("arrow")
        self._features = hf.Features({name: _undecoded(feature) for name, feature in dataset.features.items()})
        self._nested: list[str] = []

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._features.decode_example(self._table[index].to_pylist()[0])
        return row | {name: _field(row, name) for name in self._nested}

    def add_nested(self, names: Iterable[str]) -> None:
        """Make fields of columns, such as ``reward_model.ground_truth``, columns of their own. Names of no such field are left out."""
        for name in set(names) - {*self.columns}:
            feature, keys = self._features, name.split(".")
            while keys and isinstance(feature, dict):
                feature = feature.get(keys.pop(0))
            is_known = feature is not None and not keys
            if keys and isinstance(feature, ExactJson):  # its values have the fields
                root = name.partition(".")[0]
                is_known = any(_field({root: value}, name) is not None for value in self.column(root))
            if is_known:
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

    def empty_texts(self, name: str) -> list[int]:
        """The rows whose text in this column is empty or blank; none if it holds no texts."""
        if self._is_mixed(name):
            return [row for row, value in enumerate(self.column(name)) if isinstance(value, str) and not value.strip()]
        column = self._table.data.column(name)
        if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
            return []
        try:
            blank = pyarrow.compute.equal(pyarrow.compute.utf8_trim_whitespace(column), "").to_pylist()
        except pyarrow.ArrowInvalid:  # no UTF-8: its rows are bad ones
            return []
        return [row for row, is_blank in enumerate(blank) if is_blank]

    def whole_floats(self, name: str) -> list[int]:
        """The rows that have a float such as 3.0 in this column; none if it holds no floats."""
        if not self._is_mixed(name) and not pyarrow.types.is_floating(self._table.data.column(name).type):
            return []
        return [row for row, value in enumerate(self.column(name)) if isinstance(value, float) and value.is_integer()]

    def _is_mixed(self, name: str) -> bool:
        """Whether the values may have several types: those of JSON, and of fields."""
        return name in self._nested or isinstance(self._features[name], ExactJson)


def _field(row: dict[str, Any], name: str) -> Any:
    """``{"a": {"b": 1}}`` and ``a.b`` -> 1; None where there is no such part."""
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"  # older versions of datasets have none


def _undecoded(feature: Any) -> Any:
    if is_json(feature):
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
