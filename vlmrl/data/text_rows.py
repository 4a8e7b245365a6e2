"""Rows of JSON and CSV files, with their values as they are written."""

from __future__ import annotations

import csv
import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import datasets as hf

from vlmrl.data.row_images import json_as_written
from vlmrl.utils.json_files import strict_json

_TYPES = {str: "string", int: "int64", bool: "bool"}
"""Of columns of JSON and CSV files whose values are all of one of these types. Other columns are kept as JSON."""
JSON = hf.Value("string", id="vlmrl.json")
"""The type of a column that keeps its values as JSON."""
THIS_READER = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16).hexdigest()
"""For the cache of `datasets`, which would give the rows that an earlier version of this file read."""


@dataclass(frozen=True)
class ExactJson:
    """Decodes a column of the type JSON. The ``Json`` of ``datasets`` rounds numbers: 57.29 becomes 57.290000000000006."""

    def decode_example(self, written: str | None, token_per_repo_id: Any = None) -> Any:
        return None if written is None else json_as_written(written)


def load_texts(paths: list[Path], kind: str) -> hf.Dataset:
    """The rows of JSON or CSV files (``kind``), with their values as they are written.

    The readers of ``datasets`` change them: a text that looks like a time becomes a time; numbers are rounded; an object gets the keys
    of other rows' objects; values get the type that the same place has in other rows, so that 7 becomes 7.0, and "007" becomes 7. That
    of CSV does so for each 10,000 rows, of a column of texts, too.

    Raises ValueError, with the file and the line, for what is no such row.
    """
    kinds: dict[str, set[Any]] = {}
    for row in chain.from_iterable(map(_READERS[kind], paths)):
        for name, value in row.items():
            kinds.setdefault(name, set()).add(_kind(value))
    if not kinds:
        raise ValueError(f"data.path cannot be read: {', '.join(map(str, paths))} is empty.")
    features = hf.Features({name: _feature(found - {type(None)}) for name, found in kinds.items()})
    stamps = (*stamps_of(paths), THIS_READER)
    given = {"paths": tuple(map(str, paths)), "stamps": stamps, "features": features, "kind": kind}
    with reader_errors(paths):
        return hf.Dataset.from_generator(_cells, features, gen_kwargs=given, writer_batch_size=64)


def stamps_of(paths: list[Path]) -> tuple[tuple[int, int, int], ...]:
    """What changes if a file is replaced, also by one of the same time of writing, for the cache of `datasets`."""
    return tuple((stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for stat in map(Path.stat, paths))


@contextmanager
def reader_errors(paths: list[Path]) -> Iterator[None]:
    """Make any error of the readers of ``datasets`` a ValueError with the files' names and its first cause."""
    try:
        yield
    except Exception as error:  # datasets raises many kinds: StopIteration, ArrowInvalid, DatasetGenerationError
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(f"data.path cannot be read: {', '.join(map(str, paths))}: {cause}") from error


def _kind(value: Any) -> Any:
    """The type of a value; ``object`` for a whole number that takes more than 64 bits."""
    return object if isinstance(value, int) and not -(2**63) <= value < 2**63 else type(value)


def _feature(kinds: set[Any]) -> Any:
    if not kinds:
        return hf.Value("null")
    return hf.Value(_TYPES[next(iter(kinds))]) if len(kinds) == 1 and kinds <= set(_TYPES) else JSON


def _cells(paths: tuple[str, ...], stamps: Any, features: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The rows as they are stored. ``stamps`` is not read: it is part of their name in the cache."""
    for row in chain.from_iterable(map(_READERS[kind], map(Path, paths))):
        cells = {name: row.get(name) for name in features}
        yield {
            name: json.dumps(cell) if features[name] == JSON and cell is not None else cell
            for name, cell in cells.items()
        }


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file with a JSON object a line, or with one list of them. A text is a row with the column ``text``.

    Raises ValueError, with the file and the line, for anything else.
    """
    with path.open("rb") as lines:
        is_list = lines.read(100).removeprefix(BOM_UTF8).lstrip()[:1] == b"["
        lines.seek(0)
        for number, line in [(0, lines.read())] if is_list else enumerate(lines, start=1):
            try:
                yield from map(_json_row, _values(line, is_list))
            except (ValueError, RecursionError) as error:
                where = f"{path}, line {number}" if number else path
                raise ValueError(
                    f"data.path cannot be read: {where} is not JSON ({error}): {line.strip()[:80]!r}"
                ) from None


def _values(line: bytes, is_list: bool) -> list[Any]:
    text = line.decode("utf-8-sig").strip()
    if not text:
        return []
    value = strict_json(text)
    if b"\\ud" in line or b"\\uD" in line:
        json.dumps(value, ensure_ascii=False).encode()  # raises ValueError for half of a surrogate pair
    return value if is_list else [value]


def _json_row(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | str):
        raise ValueError(f"a row must be an object, but it is {value!r:.50}")
    return value if isinstance(value, dict) else {"text": value}


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of comma-separated values, which are all texts; an empty cell is None. Columns without a name are left out.

    Raises ValueError, with the file and the line, for what does not fit the first line, which has the columns' names.
    """
    csv.field_size_limit(2**31 - 1)  # for all of this process: a cell may be an image in base64
    names: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        start = 1
        try:
            for cells in lines:
                if names and cells:
                    yield _csv_row(names, cells)
                elif not names:
                    names = _csv_names(cells)
                start = lines.line_num + 1
        except UnicodeDecodeError as error:  # the file is decoded in blocks, so that the line is not known
            raise ValueError(f"data.path cannot be read: {path} is not UTF-8 ({error}): save it as UTF-8.") from None
        except (ValueError, csv.Error) as error:
            raise ValueError(f"data.path cannot be read: {path}, line {start} is not CSV ({error})") from None


def _csv_names(cells: list[str]) -> list[str]:
    twice = [name for name, count in Counter(filter(None, cells)).items() if count > 1]
    if twice:
        raise ValueError(f"several columns are called {', '.join(twice)}")
    return cells if any(cells) else []


def _csv_row(names: list[str], cells: list[str]) -> dict[str, Any]:
    if any(cells[len(names) :]):
        has = f"it has {len(cells)} cells for {len(names)} columns"
        raise ValueError(f"{has}: separate cells by commas, and put those that have commas in quotation marks")
    return {name: cell or None for name, cell in zip_longest(names, cells[: len(names)]) if name}


_READERS = {"json": _json_rows, "csv": _csv_rows}
