"""Reads a JSON-lines file while another process appends to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.utils.json_files import finite_float
from vlmrl.utils.output_files import open_regular

MOST_BYTES = 256 * 2**20  # of a line: a record of ours has a few MiB


class Line(NamedTuple):
    """One line of a file: ``Line(start=120, size=64, value={"step": 3})``, in bytes."""

    start: int
    size: int
    value: dict[str, Any]


class JsonLinesTail:
    """The complete lines that were appended to a file since the last call of :meth:`lines`.

    A line that is still being written is left for the next call. A file that does not exist yet has no lines.
    ``start`` is the byte where the first line begins.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self._end = start  # of what was read, in bytes
        self._last = b""  # the last line that was read: another one in its place means that the file was written again

    def is_rewritten(self) -> bool:
        """Whether the lines that were read are no longer in the file: a resumed run cuts it and writes the later lines again."""
        if not self._last:
            return False
        if not self.path.exists():
            return True
        with open_regular(self.path) as file:
            file.seek(self._end - len(self._last))
            return file.read(len(self._last)) != self._last

    def lines(self) -> Iterator[Line]:
        """The new lines, in order, one after the other, for files that do not fit into memory.

        Raises ValueError for a complete line that holds no JSON object, or is longer than :data:`MOST_BYTES`.
        """
        if not self.path.exists():
            return
        with open_regular(self.path) as file:
            file.seek(self._end)
            while (text := file.readline(MOST_BYTES)).endswith(b"\n"):
                line = Line(self._end, len(text), self._object(text))
                self._end, self._last = self._end + len(text), text
                yield line
            if len(text) == MOST_BYTES:
                raise ValueError(f"{self.path}: the line at byte {self._end} has more than {MOST_BYTES} bytes.")

    def reread(self, start: int, size: int) -> dict[str, Any]:
        """The line at ``start``, of ``size`` bytes."""
        with open_regular(self.path) as file:
            file.seek(start)
            return self._object(file.read(size))

    def _object(self, text: bytes) -> dict[str, Any]:
        """The object in a line. NaN and Infinity, which JSON and pages lack, become None; ``1e999`` is an error."""
        try:
            found = json.loads(text, parse_constant=lambda _: None, parse_float=finite_float)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: the line at byte {self._end} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(
                f"{self.path}: the line at byte {self._end} must be a JSON object, but it is {text[:40]!r}."
            )
        return found
