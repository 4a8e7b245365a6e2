"""Logs of agents' commands: a bounded number of files of bounded size in the run's folder."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

HALF = 2**19  # bytes: of an output that is longer than two halves, its first and its last one are written
KEPT = 1000  # logs of a run
TAIL_LINES = 20
TAIL_CHARACTERS = 2000


class CommandLog:
    """The output of one command, in the file ``path``. Its first half is written as it arrives, the rest at ``close``."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+b", buffering=0)
        self._written = self._left_out = 0
        self._end = bytearray()

    def write(self, output: bytes) -> None:
        start = output[: HALF - self._written]
        self._append(start)
        self._written += len(start)
        self._end += output[len(start) :]
        excess = max(0, len(self._end) - HALF)
        self._left_out += excess
        del self._end[:excess]

    def close(self) -> str:
        """Returns the last lines of the output."""
        if self._left_out:
            self._append(f"\n[{self._left_out} bytes are left out]\n".encode())
        self._append(self._end)
        self._file.seek(-min(4 * TAIL_CHARACTERS, self._file.tell()), 2)
        lines = self._file.read().decode(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
        self._file.close()
        return "\n".join(lines)[-TAIL_CHARACTERS:]

    def _append(self, output: bytes | bytearray) -> None:
        with contextlib.suppress(OSError):  # a full disk: the log is not worth the episode
            self._file.write(output)


class CommandLogs:
    """The logs of a run's commands: ``folder/TRAJECTORY.log``, the latest ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: deque[Path] | None = None

    def open(self, trajectory_id: str) -> CommandLog:
        """The log of a new command. The oldest logs are deleted, those of an earlier part of the run included."""
        if self._paths is None:
            self._paths = deque(sorted(self._folder.rglob("*.log"), key=lambda path: path.stat().st_mtime))
        self._paths.append(self._folder / f"{trajectory_id}.log")
        while len(self._paths) > KEPT:
            oldest = self._paths.popleft()
            oldest.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are in it
                oldest.parent.rmdir()
        return CommandLog(self._paths[-1])
