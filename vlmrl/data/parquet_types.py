"""Whether the columns of several parquet files have values of the same kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_KINDS = {
    "texts": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    "bytes": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary),
    "truth values": (pa.types.is_boolean,),
    "numbers": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
    "dates": (pa.types.is_date,),
    "times": (pa.types.is_timestamp,),
}


def check_same_kinds(paths: Iterable[Path]) -> None:
    """Raise ValueError for a column, or a field in one, that has values of another kind in another file.

    ``datasets`` gives the values of all files the types of the first one: it makes 7 of "007", and "true" of True.
    """
    first: dict[tuple[str, ...], tuple[str, Path]] = {}
    for path in paths:
        for field in pq.read_schema(path):
            for place, kind in _kinds((field.name,), field.type):
                known, earlier = first.setdefault(place, (kind, path))
                if kind != known:
                    raise ValueError(
                        f"column {'.'.join(place)!r} must have one type in all files, but it has {known} in {earlier}, and {kind} in "
                        f"{path}: write it as texts in each, or remove it, for example"
                    )


def _kinds(place: tuple[str, ...], of: pa.DataType) -> Iterator[tuple[tuple[str, ...], str]]:
    """The kinds of the values at a place: ``(("answer",), "objects"), (("answer", "truth"), "numbers")``."""
    if pa.types.is_dictionary(of):
        of = of.value_type
    if pa.types.is_struct(of):
        yield place, "objects"
        for field in of:
            yield from _kinds((*place, field.name), field.type)
    elif pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of):
        yield place, "lists"
        yield from _kinds((*place[:-1], f"{place[-1]}[]"), of.value_type)
    elif not pa.types.is_null(of):
        yield place, next((kind for kind, tests in _KINDS.items() if any(test(of) for test in tests)), str(of))
