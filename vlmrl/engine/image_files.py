"""Images in requests to servers: the path of a file, or a data URI, with a hash of the file. Each image is encoded once."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vlmrl.multimodal.images import encode_png
from vlmrl.types import MediaItem
from vlmrl.utils.machine_memory import memory_bytes
from vlmrl.utils.owned_folder import OwnedFolder
from vlmrl.utils.work_pool import SharedTasks, cpu_pool

MEMORY = Path("/dev/shm")  # a file system in memory: nothing is written to a disk
PREFIX = "vlmrl-images-"
ENCODE_SECONDS = 120.0  # for one image, which may have to be read from a file
SHARE = 0.125  # of the machine's memory, for encoded images


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as a request contains it. If it is a file, that exists as long as this object."""

    json: bytes | None
    """``"/dev/shm/vlmrl-images-x/0.ppm"`` or ``"data:image/png;base64,..."``, quotes included. None: the server holds the image."""
    sha256: str
    """Of the file's or the data's bytes: 64 hexadecimal digits."""
    size: int = 0
    """Bytes of memory."""


def shared_folder() -> Path:
    """The folder below which image files are written: in memory if the machine has such a one."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


class ImageFiles:
    """The images of requests: with ``files`` as paths, for servers that read this machine's files, else as data URIs.

    A file holds plain pixels (PPM), which take no time to write and to read; a data URI holds a PNG. An image whose file cannot be
    written, for example because the file system is full, becomes a data URI. What is encoded is released with its image; beyond
    ``budget`` bytes, by default an eighth of the machine's memory, the least recently used one is, and encoded again when needed.

    A process that is killed leaves its folder behind; the next ImageFiles with ``files`` deletes it.
    Used in one event loop at a time.
    """

    def __init__(self, files: bool, budget: int | None = None) -> None:
        self.encoded = 0
        """Number of images encoded so far."""
        self.bytes = 0
        """What the encoded images take now."""
        self._budget = int(SHARE * memory_bytes()) if budget is None else budget
        self._images: OrderedDict[weakref.ref[MediaItem], EncodedImage] = OrderedDict()
        self._hashes: weakref.WeakKeyDictionary[MediaItem, str] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # reentrant: an image may be collected at any time, in any thread
        self._encoding = SharedTasks()
        self._numbers = count()
        self._warned = False
        self._folder: OwnedFolder | None = None
        if files:
            self._open_folder(shared_folder())

    async def encode(self, item: MediaItem) -> EncodedImage:
        """The encoded image, made in the process's threads for such work unless it is held."""
        with self._lock:
            image = self._images.get(key := weakref.ref(item))
            if image is not None:
                self._images.move_to_end(key)
                return image
        making = f"{item.id} {item.size}"  # not its address, which a later image may have
        image = await self._encoding.get(making, lambda: cpu_pool().run(ENCODE_SECONDS, self._encode, item))
        self._hold(item, image)
        return image

    def sha256(self, item: MediaItem) -> str:
        """The hash of an image that was encoded before, held or not."""
        return self._hashes[item]

    def close(self) -> None:
        with self._lock:
            self._images.clear()
        if self._folder is not None:
            self._folder.close()

    def _hold(self, item: MediaItem, image: EncodedImage) -> None:
        with self._lock:
            if weakref.ref(item) in self._images:
                return  # another request for it was faster
            self._hashes[item] = image.sha256
            self._images[weakref.ref(item, self._release)] = image
            self.encoded += 1
            self.bytes += image.size
            while self.bytes > self._budget and len(self._images) > 1:
                _, oldest = self._images.popitem(last=False)
                self.bytes -= oldest.size

    def _release(self, key: weakref.ref[MediaItem]) -> None:
        with self._lock:
            image = self._images.pop(key, None)
            if image is not None:
                self.bytes -= image.size

    def _encode(self, item: MediaItem) -> EncodedImage:
        if self._folder is not None:
            width, height = item.size
            content = b"P6 %d %d 255\n" % (width, height) + item.pixels.read().tobytes()
            try:
                path = self._folder.write(f"{next(self._numbers)}.ppm", content)
            except OSError as error:
                self._warn(self._folder.path, error)
            else:
                image = EncodedImage(json.dumps(str(path)).encode(), hashlib.sha256(content).hexdigest(), len(content))
                weakref.finalize(image, self._folder.remove, path).atexit = False
                return image
        png = encode_png(item.image)
        uri = b'"data:image/png;base64,' + base64.b64encode(png) + b'"'
        return EncodedImage(uri, hashlib.sha256(png).hexdigest(), len(uri))

    def _open_folder(self, parent: Path) -> None:
        try:
            self._folder = OwnedFolder(parent, PREFIX)
        except OSError as error:
            self._warn(parent, error)

    def _warn(self, folder: Path, error: OSError) -> None:
        """Say once that requests will be larger."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"an image file cannot be written in {folder} ({error}), so requests to servers contain the image. Free space "
                "there (in a container: a larger --shm-size).",
                RuntimeWarning,
                stacklevel=2,
            )
