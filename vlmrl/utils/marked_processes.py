"""Finds and kills processes by a mark in their environment, which all processes inherit that they start."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "VLMRL_PROCESS_MARK"
KILL_SECONDS = 5.0  # a process that waits for a disk or a file server does not end before that
LOOKS = 100  # before it gives up, on a machine that stands still for seconds
ENVIRONMENT = slice(47, 49)  # the fields of /proc/PID/stat from its state on that say where it begins and ends


def kill_marked(mark: str) -> None:
    """Kill all processes whose environment has ``VLMRL_PROCESS_MARK=mark``. Returns when none is found, or after some seconds.

    A look misses a process that starts during it. So after a look that meets a process for the first time, another one follows. One
    that is met again, without the mark, is not looked at any more: with thousands on the machine, a look would take so long that
    others start in each. Does nothing where there is no /proc.
    """
    entry, until, met, unmarked = f"{MARK}={mark}".encode(), time.monotonic() + KILL_SECONDS, set[int](), set[int]()
    for look in itertools.count(1):
        listed = _processes()
        unmarked &= listed  # the number of one that has ended may be given again
        looks = {pid: _is_marked(Path(f"/proc/{pid}"), entry) for pid in listed - unmarked}
        kill_processes(pid for pid, marked in looks.items() if marked)
        # One that replaces its program may seem unmarked for a moment.
        unmarked |= {pid for pid, marked in looks.items() if marked is False and pid in met}
        if listed == unmarked or (look >= LOOKS and time.monotonic() >= until):
            return
        met |= listed
        time.sleep(0.001)


def _processes() -> set[int]:
    with contextlib.suppress(FileNotFoundError), os.scandir("/proc") as entries:
        return {int(entry.name) for entry in entries if entry.name.isdecimal()}
    return set()


def _is_marked(process: Path, entry: bytes) -> bool | None:
    """Whether a process has the mark; None while it replaces its program, when its environment cannot be read, or not to its end."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        environment = (process / "environ").read_bytes()
        if entry in environment:
            return True
        (process / "exe").readlink()  # a zombie and a thread of the kernel have none
        begin, end = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[ENVIRONMENT]
        if end == "0" or len(environment) != int(end) - int(begin):
            return None
    return False


def kill_processes(processes: Iterable[int]) -> None:
    """Send SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
