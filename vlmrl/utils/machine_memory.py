"""The memory of this machine or container, folders in memory (tmpfs), and the C library's reuse of freed memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/mounts")
VAR_TMP = Path("/var/tmp")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)
LARGEST_FROM_HEAP = 32 * 2**20  # bytes; glibc accepts no more
KEPT = 256 * 2**20  # bytes of each arena


def memory_bytes() -> int:
    """The machine's memory in bytes, or the limit of this process's control groups, such as a container's or a job's, if lower."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits()])


def _limits() -> Iterator[int]:
    """Of the process's control groups and all groups around them, under version 2 and 1."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.is_file() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            top, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if folder.is_relative_to(top) and file.is_file() and (text := file.read_text().strip()).isdigit():
                yield int(text)


def is_in_memory(folder: Path, mounts: str | None = None) -> bool:
    """Whether the files of ``folder`` take memory, as in a tmpfs. ``mounts``: the text of /proc/mounts."""
    if mounts is None:
        mounts = MOUNTS.read_text() if MOUNTS.is_file() else ""
    points = [(Path(words[1]), words[2]) for words in map(str.split, mounts.splitlines()) if len(words) > 2]
    around = [(len(point.parts), kind) for point, kind in reversed(points) if folder.resolve().is_relative_to(point)]
    return max(around, key=lambda pair: pair[0], default=(0, ""))[1] in ("tmpfs", "ramfs")


def spill_folder() -> Path:
    """The folder for what does not fit into memory: that of temporary files, or /var/tmp where that is in memory."""
    folder = Path(tempfile.gettempdir())
    is_set = any(map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    if not is_set and is_in_memory(folder) and os.access(VAR_TMP, os.W_OK) and not is_in_memory(VAR_TMP):
        return VAR_TMP
    return folder


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of what this process frees in each of its arenas, for its next allocations.

    Elsewhere it does nothing. Threads that allocate at the same time have their own arenas: a process may keep several times that.

    A training step on a CPU allocates and frees the same tensors again and again. By default glibc gives the large ones back to the
    system, which then clears every page that is taken again: a fifth of a small model's step. Call it once in a process; what
    MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES set stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_FROM_HEAP)
    mallopt(TRIM_THRESHOLD, KEPT)
