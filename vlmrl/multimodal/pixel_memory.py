"""Bounds the host memory of images' pixels: beyond a budget, further ones are written to a file.

The file has no name, so the system frees it with the process, however that ends. Pixels are written as they are: its page cache keeps
in memory what there is room for, and gives that up to others.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.utils.machine_memory import is_in_memory, memory_bytes, spill_folder

SHARE = 0.25  # of the machine's memory
MAPPED_BYTES = 2**17  # arrays from this size on are mapped
MAX_MAPPED = 20_000  # images; Linux allows a process 65,530 mappings by default


class PixelUsage(NamedTuple):
    """Bytes of images' pixels."""

    held: int
    """In memory."""
    peak: int
    """The most that were held at once so far."""
    spilled: int
    """In the file."""


class PixelMemory:
    """Holds pixels in at most ``budget`` bytes of memory, and the others in a file in ``folder``. Thread-safe.

    ``budget`` None: a quarter of the memory of this machine or container, which the processes that ``torchrun`` starts there share.
    ``folder`` None: that of :func:`spill_folder`.

    An image stays where it was put. Each read of one in the file makes an array that belongs to the reader. While the file cannot be
    written, images stay in memory, and a warning says so once.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.budget = int(SHARE * memory_bytes()) // processes if budget is None else budget
        self._folder = folder or spill_folder()
        self._lock = threading.Lock()  # of what follows
        self._file: _SpillFile | None = None
        self._released: deque[int | _Slot] = deque()
        self._images = 0  # in memory
        self._held = self._peak = self._spilled = 0
        self._warned = False

    def hold(self, array: np.ndarray) -> ArrayPixels | FilePixels:
        """A copy of the pixels ``[height, width, 3]``, uint8, as long as somebody refers to it."""
        slot = None if self._takes(array.nbytes, self.budget) else self._written(array)
        try:
            is_mapped = self._images < MAX_MAPPED
            pixels = ArrayPixels(_copied(array, is_mapped)) if slot is None else FilePixels(slot, array.shape)
        except BaseException:  # no memory
            self._released.append(slot or array.nbytes)
            raise
        # The garbage collector may call it anywhere, also in a thread that has the lock: the counts follow later.
        weakref.finalize(pixels, self._released.append, slot or array.nbytes).atexit = False
        return pixels

    def usage(self) -> PixelUsage:
        with self._lock:
            self._forget_released()
            return PixelUsage(self._held, self._peak, self._spilled)

    def _takes(self, size: int, budget: float) -> bool:
        """Whether an image of ``size`` bytes fits into memory. If it does, it counts from now on."""
        with self._lock:
            self._forget_released()
            if self._held + size > budget:
                return False
            self._images += 1
            self._held += size
            self._peak = max(self._peak, self._held)
            return True

    def _forget_released(self) -> None:
        while self._released:
            released = self._released.popleft()
            if isinstance(released, int):
                self._images -= 1
                self._held -= released
            else:
                released.file.free(released)
                self._spilled -= released.size

    def _written(self, array: np.ndarray) -> _Slot | None:
        """The place of a new image in the file. ``None``: it cannot be written, and counts as one in memory."""
        slot = None
        try:
            with self._lock:
                slot = self._opened().slot(array.nbytes)
                self._spilled += slot.size
            slot.file.write(slot.offset, array)
        except OSError as error:
            if slot is not None:
                self._released.append(slot)
            self._warn(f"cannot be written to {self._folder} ({error}), so they stay in memory")
            self._takes(array.nbytes, float("inf"))
            return None
        return slot

    def _opened(self) -> _SpillFile:
        if self._file is None or self._file.owner != os.getpid():  # a fork must not write to its parent's
            self._file = _SpillFile(self._folder)
            if is_in_memory(self._folder):
                self._warn(f"go to {self._folder}, which is in memory, so they are not bounded")
        return self._file

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"images beyond a quarter of the memory ({self.budget / 2**30:.3g} GiB) {what}. Set the environment variable TMPDIR "
                "to a folder on a disk with room for all images of the batches in progress.",
                RuntimeWarning,
                stacklevel=2,
            )


def _copied(array: np.ndarray, may_map: bool) -> np.ndarray:
    """A read-only copy in memory of its own, which the system gets back as soon as nobody uses it.

    From malloc, images that come and go between other data would leave holes: half as much memory again, measured.
    """
    if array.nbytes < MAPPED_BYTES or not may_map:
        copied = array.copy()
    else:
        memory = mmap.mmap(-1, array.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copied = np.frombuffer(memory, np.uint8).reshape(array.shape)
        copied[...] = array
    copied.setflags(write=False)
    return copied


@dataclass(frozen=True, eq=False)
class FilePixels:
    """Pixels in the file of a :class:`PixelMemory`, as long as somebody refers to this object."""

    slot: _Slot
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """``[height, width, 3]``, uint8, read-only."""
        return self.slot.file.read(self.slot.offset, self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the array, which its own memory may hold."""
        return ArrayPixels, (self.read(),)


class _Slot(NamedTuple):
    """A part of a file, in bytes."""

    file: _SpillFile
    offset: int
    size: int


class _SpillFile:
    """A file without a name, whose free parts are used again for images of about the same size. Reads and writes are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as this object
        # Free slots refer to this object: the garbage collector alone would close the file, with Python's warning. At the end of the
        # process the system closes it: threads may still read.
        weakref.finalize(self, self._file.close).atexit = False
        self._free: defaultdict[int, list[_Slot]] = defaultdict(list)
        self._end = 0
        self.owner = os.getpid()

    def slot(self, size: int) -> _Slot:
        """A part of at least ``size`` bytes: at most an eighth more, or the rest of a page, of which nothing is written."""
        step = 1 << max(12, size.bit_length() - 4)
        rounded = -(-size // step) * step
        if self._free[rounded]:
            return self._free[rounded].pop()
        self._end += rounded
        return _Slot(self, self._end - rounded, rounded)

    def free(self, slot: _Slot) -> None:
        self._free[slot.size].append(slot)

    def write(self, offset: int, array: np.ndarray) -> None:
        data = array.reshape(-1).data
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(shape, np.uint8)
        if os.preadv(self._file.fileno(), [array.reshape(-1).data], offset) != array.nbytes:
            raise OSError(f"the file of images ended at {offset} + {array.nbytes} bytes.")
        array.setflags(write=False)
        return array
