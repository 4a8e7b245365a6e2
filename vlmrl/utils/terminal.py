"""Prints untrusted text on a terminal with its control characters escaped: they could write to the clipboard or hide a line.

The output of a run may end before the run does: its reader ended, its terminal was closed, or its disk is full.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment

STDERR = 2  # its file descriptor
# Control characters, those that change the direction of text, and halves of surrogate pairs.
_CONTROLS = re.compile(r"[^\t\n\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def printable(text: str) -> str:
    """``text`` with its control characters, but tab and newline, as escapes: ``\\x1b``."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As ``sys.excepthook``, of an error that may quote a model's chat template or another text of others."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def printable_log(name: str) -> logging.Logger:
    """A logger whose arguments and tracebacks are :func:`printable`: they have texts of servers and clients."""
    log = logging.getLogger(name)
    log.addFilter(_printable_record)
    return log


def _printable_record(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(str(each)) if isinstance(each, str | BaseException) else each for each in record.args
        )
    if record.exc_info:
        shown = logging.Formatter().formatException(record.exc_info)
        if (safe := printable(shown)) != shown:
            # Formatters take the text from here.
            record.exc_text = safe
    return True


class Terminal(Console):
    """A console that prints only what is :func:`printable`."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class RunTerminal(Terminal):
    """For a program that writes its results to files: it goes on when nothing can be printed any more."""

    def on_broken_pipe(self) -> None:
        drop_output(self.file)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        except OSError:
            drop_output(self.file)


def drop_output(stream: IO[str]) -> None:
    """Let all that is written to ``stream`` go nowhere, after it could not be written: also the interpreter's flush at the end.

    So does standard error if it is the same file, as with ``2>&1 | tee log``.
    """
    with suppress(OSError, ValueError):  # it has no file
        lost, nothing = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        for number in {lost, STDERR} if os.path.sameopenfile(lost, STDERR) else {lost}:
            os.dup2(nothing, number)
        os.close(nothing)


def stop_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP, the end of the terminal: they stop a run. Under `nohup` SIGHUP stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (not ignored)


@contextmanager
def signals_handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> Iterator[None]:
    """Within the context, signals go to ``handler``. Only the main thread can set handlers: in another one this does nothing."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.signal(number, handler) for number in numbers} if in_main_thread else {}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)
