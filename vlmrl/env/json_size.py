"""Counts the values of a JSON text while it arrives, before a parser that holds the interpreter for all of it reads it."""

from __future__ import annotations

import re

from vlmrl.utils.json_files import MAX_DIGITS

LONG_NUMBER = re.compile(rb"(?<!\d)\d{%d}" % (MAX_DIGITS + 1))
LINE_ENDS = re.compile(rb"\r\n|\r|\n")


class JsonSize:
    """Counts of the parts given so far: ``size = JsonSize(); size.add(b'{"a": "[,", "b": [1'); size.values, size.objects`` is (3, 1).

    ``values`` are commas and opening brackets outside of strings, ``objects`` the braces among them, and ``long_numbers`` the parts
    with a number of more than MAX_DIGITS digits, whose reading and writing takes a time that grows with the square of its length. Of a
    stream of events (``is_stream``) each line is a text of its own, and ``lines`` counts their ends.
    """

    def __init__(self, is_stream: bool = False) -> None:
        self.bytes = self.values = self.objects = self.lines = self.long_numbers = 0
        self._is_stream = is_stream
        self._in_string = False
        self._rest = b""  # a backslash whose escaped character is in the next part
        self._digits = b""  # which the last part ended with, perhaps

    def add(self, part: bytes) -> None:
        self.bytes += len(part)
        if not self._is_stream:
            self._count(part)
            return
        first, *others = LINE_ENDS.split(part)
        self._count(first)
        for line in others:
            self._in_string, self._rest, self._digits = False, b"", b""
            self._count(line)
        self.lines += len(others)

    def _count(self, part: bytes) -> None:
        part = (self._rest + part).replace(b"\\\\", b"").replace(b'\\"', b"")
        self._rest = b"\\" if part.endswith(b"\\") else b""
        pieces = part.split(b'"')
        outside = b"".join(pieces[int(self._in_string) :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        braces = outside.count(b"{")
        self.objects += braces
        self.values += braces + outside.count(b"[") + outside.count(b",")
        digits = self._digits + outside
        self.long_numbers += LONG_NUMBER.search(digits) is not None
        self._digits = digits[-MAX_DIGITS:]
