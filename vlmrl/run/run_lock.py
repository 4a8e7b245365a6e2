"""One process at a time writes a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from vlmrl.utils.output_files import output_errors

BEAT = 5.0
"""Seconds after which the holder of a lock touches its file again: not all file systems have locks, or have them between machines."""
WATCH = 30.0
"""Seconds without a touch after which a holder that the kernel does not know of has ended."""

_held: list[TextIO] = []
"""The files that are locked. A fork of this process lets go of them: a pool's workers may outlive a run that is killed."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run whose files are in ``folder``. The lock's file is beside the folder, which may be renamed.

    A link has two locks, of its own name and of the folder that it leads to: a new run takes over the link's name alone.

    The kernel releases the lock when the process ends, however it ends. On a file system without locks, or whose locks hold on one
    machine alone, a holder is known by its touches of the file; two that start within the same moment are not noticed there.

    Raises:
        ValueError: another process holds it. Nothing has been moved or written.
    """
    named, real = Path(os.path.realpath(folder.parent)) / folder.name, Path(os.path.realpath(folder))
    with ExitStack() as locks:
        for path in dict.fromkeys((named, real)):
            locks.enter_context(_lock(path))
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with output_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.parent / f".{folder.name}.lock"
        file = _open(path)
    with file:
        if (other := _holder(file, path)) is not None:
            raise ValueError(
                f"name must be that of a run that no other process writes, but {folder} is written by {other.strip()}: wait for "
                "that run, end it, or set another name."
            )
        with output_errors(folder):
            file.truncate(0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
            os.write(file.fileno(), holder.encode())  # past the buffer, whose closing would fail again
        _held.append(file)
        ended = threading.Event()
        threading.Thread(target=_beat, args=(path, ended), name="lock", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            _held.remove(file)
            with suppress(OSError):
                file.seek(0)
                if file.read() == holder:  # no other one has taken over
                    file.truncate(0)  # it ended in order: the next one need not watch


def _holder(file: TextIO, path: Path) -> str | None:
    """What the lock's file says about the process that holds it. None: no other process does, and this one has the lock."""
    has_locks = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read()
    except OSError:
        has_locks = False
    file.seek(0)
    last = file.read()
    if not last or (has_locks and f" on {socket.gethostname()}, since " in last):  # it ended
        return None
    print(
        f"locked    {path.with_suffix('').name[1:]} was written by {last.strip()}: waiting {WATCH:g} s to see whether it still is"
    )
    return last if _is_touched(file) else None


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _is_touched(file: TextIO) -> bool:
    """Whether another process touches the file. Clocks are not compared: those of machines differ."""
    end, before = time.monotonic() + WATCH, os.fstat(file.fileno()).st_mtime_ns
    while time.monotonic() < end:
        time.sleep(min(0.5, WATCH / 10))
        if os.fstat(file.fileno()).st_mtime_ns != before:
            return True
    return False


def _open(path: Path) -> TextIO:
    """Open a lock's file, which is written: a link in a folder of somebody else's could lead to any file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(handle, "a+", encoding="utf-8", errors="replace")
        os.close(handle)
    raise ValueError(
        f"{path} must be a regular file, since it is the lock of a run, but it is a link or a device: remove it."
    )


def _let_go() -> None:
    """In a fork: its copies of the locked files become the null device."""
    for file in _held:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, file.fileno(), inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
