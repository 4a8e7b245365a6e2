"""Folders for files that are removed when their process ends, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

LOCK = "owner.lock"


class OwnedFolder:
    """A new folder ``path`` in ``parent``, whose name begins with ``prefix``, with a lock that this process holds as long as it lives.

    It is deleted when it is closed or collected, and at exit, by this process alone and by no fork of it. A process that is killed
    leaves its folder behind: the next one with the same ``parent`` and ``prefix`` on this machine deletes it.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        sweep(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            new = self.path / f"{LOCK}.new"
            lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # It appears locked: a process that starts now does not take it for a dead one's.
            new.rename(self.path / LOCK)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._owner = os.getpid()
        self._cleanup = weakref.finalize(self, _delete, self.path, lock, self._owner)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file, whole or not at all. Raises OSError."""
        path, part = self.path / name, self.path / f"{name}.part"
        try:
            part.write_bytes(content)
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return path

    def remove(self, path: Path) -> None:
        """Delete a file of the folder, if it is still there. Does nothing in a fork of the owner."""
        if os.getpid() == self._owner:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._cleanup()


def sweep(parent: Path, prefix: str) -> None:
    """Delete the folders in ``parent`` whose owners have ended without it. Others' and unreadable ones stay."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)  # its owner lives
        else:
            _delete(folder, lock, os.getpid())


def _delete(folder: Path, lock: int, owner: int) -> None:
    """Delete ``folder``, unless this process is a fork of its ``owner``."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
