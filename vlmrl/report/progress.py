"""Progress of a run on the console: a live progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlmrl.utils.terminal import RunTerminal


class RunProgress:
    """One progress bar per phase of a run: ``with progress.phase("train", 100) as phase: phase.advance(reward=0.4)``."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or RunTerminal(soft_wrap=True)

    def say(self, text: str) -> None:
        """Print ``text`` as it is. Brackets are no markup, and what the terminal cannot show is escaped."""
        encoding = self.console.encoding
        self.console.print(text.encode(encoding, "backslashreplace").decode(encoding), highlight=False, markup=False)

    def phase(self, name: str, total: int, done: int = 0) -> Phase:
        """A bar of ``total`` units, of which ``done`` were done before a resume."""
        return Phase(self.console, name, total, done)


class Phase:
    """One progress bar. It is redrawn in place on a terminal; elsewhere a line is printed at most every ``interval`` seconds."""

    def __init__(self, console: Console, name: str, total: int, done: int = 0, interval: float = 10.0) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._before = self._done = done
        self._interval = interval
        self._first: float | None = None  # when the first unit was finished; it often takes longer than the others
        self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=False,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, note="")

    def __enter__(self) -> Phase:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def advance(self, **numbers: float | None) -> None:
        """Count one finished unit and show ``numbers`` with their names beside the bar."""
        self._done += 1
        note = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items() if value is not None)
        self._bar.update(self._task, advance=1, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._printed > self._interval or self._done == self._total):
            left = ""
            if self._first is not None:
                a_unit = (now - self._first) / (self._done - self._before - 1)
                left = f"  {a_unit * (self._total - self._done):.0f} s left"
            self._console.print(f"{self._name:<11} {self._done}/{self._total}  {note}{left}", highlight=False)
            self._printed = now
        self._first = self._first or now


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
