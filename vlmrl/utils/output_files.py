"""Atomic writes of files and folders, with one-line errors of the disk."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}


LONGEST_PATH = 4096
"""Characters: no longer path can be opened. Following the links in one takes a time that grows with the square of its length."""
NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
"""What a file system says that cannot flush a folder, such as that of VirtualBox's shared folders."""
FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", 0)  # only to open what is in it


class OutputError(OSError):
    """The disk refused a file of the run: ``runs/x/model cannot be written: No space left on device. ...``"""


@contextmanager
def output_errors(path: Path, option: str = "output_dir") -> Iterator[None]:
    """Raise the disk's errors of the block as an OutputError that names ``path`` and the ``option`` to change."""
    try:
        yield
    except OutputError:
        raise
    except Exception as error:  # tokenizers raises no kind of its own
        reason = _disk_reason(error)
        if reason is None:
            raise
        raise OutputError(
            f"{path} cannot be written: {reason}. Free space or change permissions there, or set {option} to another folder."
        ) from error


def regular_file(folder: Path, *names: str) -> Path | None:
    """The regular file ``folder/NAME/...``; ``None`` if it is anything else, or if a name leads elsewhere: a link, ``..``, ``/etc``.

    ``folder`` itself may be a link.
    """
    if any(len(name) > LONGEST_PATH for name in names):
        return None
    path = folder.joinpath(*names)
    try:
        # Path.resolve raises where links go in circles
        is_own = os.path.realpath(path) == str(Path(os.path.realpath(folder)).joinpath(*names))
        is_absolute = any(Path(name).is_absolute() for name in names)  # joined, it would replace the folder
        return path if is_own and not is_absolute and path.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def open_regular(path: Path, folder: Path | None = None) -> BinaryIO:
    """Open a file below ``folder``, by default the one that it is in, to read it. ``folder`` itself may be a link.

    Raises ValueError for a link on the way, ``..``, a pipe or a device, also if it took the place of a file just now: an earlier look
    at the path does not say what is opened.
    """
    folder = path.parent if folder is None else folder
    parts = path.relative_to(folder).parts
    if not parts or ".." in parts:
        raise ValueError(f"{path}: it must be a file below {folder}.")
    *folders, name = parts
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | FOLDER)
    try:
        for each in folders:
            handle = _replaced(handle, each, FOLDER)
        handle = _replaced(handle, name, os.O_NONBLOCK)  # opening a pipe would wait for a writer
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(os.dup(handle), "rb")
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    finally:
        os.close(handle)
    raise ValueError(f"{path}: it must be a regular file, but it is a link, a pipe, a device or a folder.")


def _replaced(handle: int, name: str, flags: int) -> int:
    """The handle of what is called ``name`` in the folder of ``handle``, which is closed. No link is followed."""
    inner = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, dir_fd=handle)
    os.close(handle)
    return inner


def check_writable(path: Path, option: str) -> None:
    """Make the folder of the file ``path``. Raises OutputError, which names ``option``, unless :func:`whole_file` can write it.

    What has its name already is not opened: in somebody else's folder it may be a link or a pipe.
    """
    with output_errors(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = _part_of(path)
        part.touch(exist_ok=False)
        part.unlink()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path in the same folder to write to. The file gets the name ``path`` when the block ends, and is deleted on an error.

    Several may write the same file: the last one stays.
    """
    part = _part_of(path)
    with output_errors(path):
        try:
            yield part
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _part_of(path: Path) -> Path:
    return path.with_name(f".part-{uuid.uuid4().hex[:12]}-{path.name}")  # writers may look at the suffix


def atomic_write(path: Path, text: str) -> None:
    """Write a text file. Raises OutputError."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(folder: Path, option: str = "output_dir", *, replaces: bool = True) -> Iterator[Path]:
    """An empty folder to write to. When the block ends it is flushed to the disk and takes the name ``folder``; an earlier one of
    that name is deleted, or is an error unless it is empty, if ``replaces`` is False. After an error nothing is left of it.

    All files get the mode that the umask gives, where a file can have one: safetensors would make them readable by their owner alone.
    """
    part = folder.with_name(f".{folder.name}.part")
    with output_errors(folder, option):
        try:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            part.mkdir(parents=True)
            mode = _usual_mode(part)
            yield part
            for path in (*part.rglob("*"), part):
                # A disk of Windows that is mounted for another user refuses it.
                if path.is_file():
                    with suppress(OSError):
                        path.chmod(mode)
                _flush(path)
            earlier = _aside(folder) if replaces else None
            part.rename(folder)
            _flush(folder.parent)
            if earlier is not None:
                _delete(earlier)  # last, as it takes long
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists. It is renamed first, so that no half of it keeps its name.

    What cannot be deleted, since another program has it open, keeps the hidden name until a folder of the same name is replaced again.
    """
    if (removed := _aside(folder)) is not None:
        _delete(removed)


def _aside(folder: Path) -> Path | None:
    """Rename a folder to a hidden name, which is returned. None: it does not exist."""
    if not (folder.exists() or folder.is_symlink()):
        return None
    name = re.compile(re.escape(f".{folder.name}.old") + "[0-9]*")
    for left in [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]:
        _delete(left)  # left by a process that was killed, or as a file in it was open
    names = (folder.with_name(f".{folder.name}.old{number or ''}") for number in itertools.count())
    return folder.rename(next(free for free in names if not os.path.lexists(free)))


def _delete(folder: Path) -> None:
    """Delete a folder as far as possible. Of a link to one, such as a checkpoint that was moved to another disk, only the link.

    On NFS and sshfs a file that another program has open is renamed instead, and keeps its folder until it is closed.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _usual_mode(folder: Path) -> int:
    """The mode of a new file. Reading the umask itself would change it for other threads."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def _flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Not all file systems can flush a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (error.errno in NO_FLUSH and path.is_dir()):
            raise
    finally:
        os.close(handle)


def _disk_reason(error: Exception) -> str | None:
    """What the disk said; ``None`` for an error of another kind."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in DISK_ERRORS else None
    if "inline_container" in str(error):  # torch's writer, which does not pass the reason on
        return "its disk is full, or refuses to be written to"
    number = re.search(r"os error (\d+)", str(error))  # safetensors, tokenizers
    return os.strerror(int(number[1])) if number and int(number[1]) in DISK_ERRORS else None
