"""Images in requests to servers: a PNG as a data URI, or the path of a PNG file. Each image is encoded once."""

from __future__ import annotations

import asyncio
import json
import tempfile
import weakref
from itertools import count
from pathlib import Path

from vlmrl.multimodal.images import encode_png, png_data_uri
from vlmrl.types import MediaItem
from vlmrl.utils.threads import DaemonPool

MEMORY = Path("/dev/shm")  # a file system in memory: nothing is written to a disk


class ImageFiles:
    """Each image as a JSON string: with ``files`` a path, for servers that read this machine's files, else a data URI.

    Path and data URI live as long as the image. Used from one event loop.
    """

    def __init__(self, files: bool) -> None:
        self.encoded = 0
        """Number of PNGs made."""
        self._payloads: weakref.WeakKeyDictionary[MediaItem, asyncio.Future[bytes]] = weakref.WeakKeyDictionary()
        self._pool = DaemonPool("images", 2)
        self._numbers = count()
        where = MEMORY if MEMORY.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="vlmrl-images-", dir=where) if files else None

    async def payload(self, item: MediaItem) -> bytes:
        """``"data:image/png;base64,..."`` or ``"/dev/shm/vlmrl-images-x/0.png"``, quotes included."""
        if item not in self._payloads:
            self.encoded += 1
            self._payloads[item] = asyncio.ensure_future(self._pool.run(self._make, item))
        return await asyncio.shield(self._payloads[item])

    def close(self) -> None:
        self._pool.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _make(self, item: MediaItem) -> bytes:
        if self._folder is None:
            return f'"{png_data_uri(item.image)}"'.encode()
        path = Path(self._folder.name) / f"{next(self._numbers)}.png"
        path.write_bytes(encode_png(item.image))
        weakref.finalize(item, path.unlink, missing_ok=True).atexit = False
        return json.dumps(str(path)).encode()
