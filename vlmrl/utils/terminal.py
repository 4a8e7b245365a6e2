"""Prints untrusted text on a terminal with its control characters escaped: they could write to the clipboard or hide a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

# control characters, those that change the direction of text, and halves of surrogate pairs
_CONTROLS = re.compile(r"[^\t\n\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def printable(text: str) -> str:
    """``text`` with its control characters, but tab and newline, as escapes: ``\\x1b``."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal(Console):
    """A console that prints only what is :func:`printable`."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
