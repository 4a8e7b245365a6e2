"""One process at a time writes a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from vlmrl.utils.output_files import output_errors

_held: list[TextIO] = []
"""The files that are locked. A fork of this process lets go of them: a pool's workers may outlive a run that is killed."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run whose files are in ``folder``. The lock's file is beside the folder, which may be renamed.

    A link has two locks, of its own name and of the folder that it leads to: a new run takes over the link's name alone.

    The kernel releases the lock when the process ends, however it ends. On a file system that several machines share it holds between
    them, if that file system has locks; where it has none, the run goes on without.

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
        file = _open(folder.parent / f".{folder.name}.lock")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"name must be that of a run that no other process writes, but {folder} is written by {file.read().strip()}: wait for "
                "that run, end it, or set another name."
            ) from None
        except OSError:
            pass  # the file system has no locks
        with output_errors(folder):
            file.truncate(0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
            os.write(file.fileno(), holder.encode())  # past the buffer, whose closing would fail again
        _held.append(file)
        try:
            yield
        finally:
            _held.remove(file)


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
            return os.fdopen(handle, "a+", encoding="utf-8")
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
