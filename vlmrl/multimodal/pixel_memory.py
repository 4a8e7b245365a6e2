"""Bounds the host memory of images' pixels: beyond a budget, the least recently used ones are moved to a file.

The file has no name, so the system frees it with the process, however that ends. Pixels are written as they are: its page cache keeps
in memory what there is room for, and gives that up to others.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlmrl.config import Multimodal
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.utils.machine_memory import is_in_memory, memory_bytes

DEFAULT_SHARE = 0.25  # of the machine's memory
RETRY_SECONDS = 30.0  # after the file could not be written
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
    ``folder`` None: the system's folder for temporary files.

    A thread that adds an image makes room for it, so what is held exceeds the budget by at most one image for each such thread. An
    image in the file stays there: each read makes an array that belongs to the reader. If the file cannot be written, images stay in
    memory, and a warning says so once.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.budget = int(DEFAULT_SHARE * memory_bytes()) // processes if budget is None else budget
        self._folder = folder or Path(tempfile.gettempdir())
        self._lock = threading.Lock()  # of what follows
        self._file: _SpillFile | None = None
        self._in_memory: OrderedDict[_Entry, None] = OrderedDict()  # the least recently used first
        self._released: deque[_Entry] = deque()
        self._held = self._peak = self._spilled = 0
        self._retry_at = 0.0  # monotonic seconds
        self._warned = False

    @classmethod
    def of(cls, settings: Multimodal) -> PixelMemory:
        return cls(None if settings.memory_gib is None else int(settings.memory_gib * 2**30))

    def hold(self, array: np.ndarray) -> HeldPixels:
        """A copy of the pixels ``[height, width, 3]``, uint8, as long as somebody refers to it."""
        entry = _Entry(self._copied(array))
        pixels = HeldPixels(self, entry)
        weakref.finalize(pixels, self._release, entry).atexit = False
        with self._lock:
            self._keep(entry)
            self._peak = max(self._peak, self._held)
        self._make_room()
        return pixels

    def usage(self) -> PixelUsage:
        with self._lock:
            self._forget_released()
            return PixelUsage(self._held, self._peak, self._spilled)

    def read(self, entry: _Entry) -> np.ndarray:
        """The entry's pixels. From now on it is the most recently used one."""
        array = entry.array
        if array is None:
            assert entry.slot is not None
            return entry.slot.file.read(entry.slot.offset, entry.shape)
        with self._lock:
            if entry in self._in_memory:
                self._in_memory.move_to_end(entry)
        return array

    def _copied(self, array: np.ndarray) -> np.ndarray:
        """A read-only copy in memory of its own, which the system gets back as soon as nobody uses it.

        From malloc, images that come and go between other data would leave holes: half as much memory again, measured.
        """
        if array.nbytes < MAPPED_BYTES or len(self._in_memory) >= MAX_MAPPED:
            copied = array.copy()
        else:
            memory = mmap.mmap(-1, array.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            copied = np.frombuffer(memory, np.uint8).reshape(array.shape)
            copied[...] = array
        copied.setflags(write=False)
        return copied

    def _release(self, entry: _Entry) -> None:
        """Free the memory of an image that nobody refers to.

        The garbage collector may call it anywhere, also in a thread that has the lock: the counts follow later.
        """
        entry.is_released = True
        entry.array = None
        self._released.append(entry)

    def _forget_released(self) -> None:
        while self._released:
            entry = self._released.popleft()
            if entry in self._in_memory:
                del self._in_memory[entry]
                self._held -= entry.size
            elif entry.slot is not None:
                entry.slot.file.free(entry.slot)
                self._spilled -= entry.size

    def _keep(self, entry: _Entry) -> None:
        self._in_memory[entry] = None
        self._held += entry.size

    def _make_room(self) -> None:
        """Move images to the file until the others fit, or until it cannot be written."""
        while (found := self._next_to_move()) is not None:
            entry, array = found
            try:
                slot = self._write(array)
            except OSError as error:
                self._stay(entry, error)
                return
            with self._lock:
                if entry.is_released:  # while it was written
                    slot.file.free(slot)
                else:
                    entry.slot, entry.array = slot, None
                    self._spilled += entry.size

    def _next_to_move(self) -> tuple[_Entry, np.ndarray] | None:
        """The least recently used image, which counts as held no longer. ``None``: all fit, or nothing can be done."""
        with self._lock:
            self._forget_released()
            while self._held > self.budget and self._in_memory and time.monotonic() >= self._retry_at:
                entry, _ = self._in_memory.popitem(last=False)
                self._held -= entry.size
                if (array := entry.array) is not None:
                    return entry, array
            return None

    def _write(self, array: np.ndarray) -> _Slot:
        with self._lock:
            if self._file is None or self._file.owner != os.getpid():  # a fork must not write to its parent's
                self._file = _SpillFile(self._folder)
                if is_in_memory(self._folder):
                    self._warn(f"go to {self._folder}, which is in memory, so they are not bounded")
            file, slot = self._file, self._file.slot(array.nbytes)
        try:
            file.write(slot.offset, array)
        except OSError:
            with self._lock:
                file.free(slot)
            raise
        return slot

    def _stay(self, entry: _Entry, error: OSError) -> None:
        with self._lock:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not entry.is_released:
                self._keep(entry)
                self._in_memory.move_to_end(entry, last=False)
            self._warn(f"cannot be written to {self._folder} ({error}), so they stay in memory")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"images beyond multimodal.memory_gib ({self.budget / 2**30:.3g} GiB) {what}. Set the environment variable TMPDIR to "
                "a folder on a disk with room for all images of the batches in progress.",
                RuntimeWarning,
                stacklevel=2,
            )


class HeldPixels:
    """Pixels in a :class:`PixelMemory`, as long as somebody refers to this object."""

    def __init__(self, memory: PixelMemory, entry: _Entry) -> None:
        self._memory = memory
        self._entry = entry

    def read(self) -> np.ndarray:
        """``[height, width, 3]``, uint8, read-only. It may read a file."""
        return self._memory.read(self._entry)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the array, which its own memory may hold."""
        return ArrayPixels, (self.read(),)


class _Entry:
    """One image of a :class:`PixelMemory`: in memory until ``slot`` is set."""

    def __init__(self, array: np.ndarray) -> None:
        self.array: np.ndarray | None = array
        self.shape = array.shape
        self.size = array.nbytes
        self.slot: _Slot | None = None
        self.is_released = False


class _Slot(NamedTuple):
    """A part of a file, in bytes."""

    file: _SpillFile
    offset: int
    size: int


class _SpillFile:
    """A file without a name, whose free parts are used again for images of about the same size. Reads and writes are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as this object
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
