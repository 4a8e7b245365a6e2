"""Finds processes by a mark in their environment, which all processes inherit that they start."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MARK = "VLMRL_PROCESS_MARK"


def marked_processes(mark: str) -> list[int]:
    """The processes whose environment has ``VLMRL_PROCESS_MARK=mark``; empty where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_processes(processes: Iterable[int]) -> None:
    """Send SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
