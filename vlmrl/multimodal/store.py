"""The media store: each distinct image is loaded, hashed and resized once.

The turn loop gets a :class:`MediaItem` for every image of a prompt or an observation. The store keeps only weak references: an item
exists as long as a trajectory or sample holds it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from vlmrl.families.base import Family, Size
from vlmrl.multimodal.fetch import SECONDS, fetch, is_url
from vlmrl.multimodal.images import (
    DecodedImage,
    ImageError,
    ImageUnavailableError,
    content_hash,
    content_of,
    decode,
    describe,
    image_size,
    naming,
    source_key,
)
from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.types import ImageSource, MediaItem
from vlmrl.utils.http import http_loop
from vlmrl.utils.work_pool import DeadlineError, SharedTasks, WorkPool, cpu_pool

T = TypeVar("T")


class Measure(NamedTuple):
    """An image's sizes, (width, height), and its number of tokens."""

    given: Size
    """The image's own size."""
    shown: Size
    """Its size at the model."""
    num_tokens: int


class MediaStore:
    """Makes the :class:`MediaItem` of each distinct image once. Thread-safe.

    ``image_processor`` is from :meth:`Family.load_processor`; ``max_pixels`` lowers its limit. ``transform`` is applied to each
    decoded image, for controls such as :func:`vlmrl.multimodal.images.blank`. ``seen`` counts requested images, ``processed`` those
    that were made into an item.

    ``memory`` holds the pixels; None: one of the default budget. All bookkeeping is done in the process's event loop for images. The
    threads of ``pool``, by default those of the process, decode, hash and resize. An address is fetched in the loop, so that a slow
    one holds no thread, and neither does a second request for an image that is being made.
    """

    def __init__(
        self,
        family: Family,
        image_processor: Any,
        *,
        max_pixels: int | None = None,
        transform: Callable[[Image.Image], Image.Image] | None = None,
        pool: WorkPool | None = None,
        memory: PixelMemory | None = None,
    ) -> None:
        self._family = family
        self._processor = image_processor
        self._max_pixels = max_pixels
        self._transform = transform
        self._pool = pool or cpu_pool()
        self.memory = memory or PixelMemory()
        self._items: weakref.WeakValueDictionary[str, MediaItem] = weakref.WeakValueDictionary()
        self._ids: dict[str, str] = {}  # source key -> content hash
        self._loading = SharedTasks()  # by source key
        self._processing = SharedTasks()  # by content hash
        self.seen = 0
        self.processed = 0
        self.seconds = 0.0
        """Of the threads that decoded, hashed and resized, summed."""

    async def get(self, source: ImageSource, seconds: float = SECONDS) -> MediaItem:
        """The image's item; a source that is one already is returned as it is.

        ``seconds`` is the deadline of fetching an address, with all attempts, and of each piece of work on the image, counted from
        when a thread begins it. Time in the queue does not count.

        Raises:
            ImageError: the source is no image, or none that the processor accepts; a ValueError.
            ImageUnavailableError: a deadline passed; another attempt may succeed.
        """
        if isinstance(source, MediaItem):
            return source
        return await http_loop().run(self._get(source, seconds))

    def load(self, source: ImageSource) -> MediaItem:
        """As :meth:`get`; the calling thread waits."""
        return http_loop().wait(self._get(source, SECONDS))

    def measure(self, source: ImageSource) -> Measure:
        """The size and token count that the image would have after :meth:`load`, without decoding it.

        An image at an address is fetched for it, while the calling thread waits. Raises as :meth:`get`.
        """
        given = image_size(source)
        shown = self._resized(source, given)
        return Measure(given, shown, self._family.num_tokens(self._processor, shown))

    async def _get(self, source: ImageSource, seconds: float) -> MediaItem:
        self.seen += 1
        if isinstance(source, DecodedImage) and self._transform is None:
            key = source.id
        else:
            key = await self._run(source, seconds, source_key, source)
        item = self._find(key)
        if item is None:
            item = await self._loading.get(key, lambda: self._load(key, source, seconds))
        return item

    def _find(self, key: str) -> MediaItem | None:
        """The item of a source key or content hash, if it still exists."""
        return self._items.get(self._ids.get(key, key))

    async def _load(self, key: str, source: ImageSource, seconds: float) -> MediaItem:
        image: Image.Image | DecodedImage
        content = content_of(source)
        if is_url(content):
            with naming(source):
                content = await fetch(content, seconds)
        if isinstance(content, DecodedImage) and self._transform is None:
            self._resized(source, content.size)  # raises for a size that the processor refuses
            name, image = content.id, content
        else:
            name, image = await self._run(source, seconds, self._decode, source, content)
        item = self._find(name)
        if item is None:
            item = await self._processing.get(name, lambda: self._process(name, source, image, seconds))
        self._ids[key] = name
        weakref.finalize(item, self._ids.pop, key, None).atexit = False
        return item

    async def _process(
        self, name: str, source: ImageSource, image: Image.Image | DecodedImage, seconds: float
    ) -> MediaItem:
        # First in the queue: otherwise many decoded images would wait there, at their full size.
        item = await self._run(source, seconds, self._new_item, name, image, first=True)
        self.processed += 1
        self._items[name] = item
        return item

    async def _run(
        self, source: ImageSource, seconds: float, function: Callable[..., T], *args: Any, first: bool = False
    ) -> T:
        """One call in the store's threads."""
        try:
            result, spent = await self._pool.run(seconds, _timed, function, *args, first=first)
        except DeadlineError as error:
            raise ImageUnavailableError(f"an image does not load: {describe(source)}: {error}") from error
        self.seconds += spent  # in the loop for images, as all bookkeeping
        return result

    def _decode(self, source: ImageSource, content: ImageSource) -> tuple[str, Image.Image]:
        """The decoded image and its content hash, for a source whose content is no URL."""
        with naming(source):
            image = decode(content)
        if self._transform is not None:
            image = self._transform(image)
        self._resized(source, image.size)
        return content_hash(image), image

    def _resized(self, source: ImageSource, size: Size) -> Size:
        try:
            return self._family.resized(self._processor, size, self._max_pixels)
        except ValueError as error:
            reason = f"it is {size[0]}x{size[1]} pixels, which the model's image processor refuses: {error}"
            raise ImageError(f"an image does not load: {describe(source)}: {reason}", reason) from error

    def _new_item(self, name: str, image: Image.Image | DecodedImage) -> MediaItem:
        """Resize as the processor would."""
        family, processor = self._family, self._processor
        size = family.resized(processor, image.size, self._max_pixels)
        if size != image.size:
            image = family.resize(processor, decode(image), size)
        tokens, separators = family.num_tokens(processor, size), family.separators(processor, size)
        pixels = self.memory.hold(image.pixels if isinstance(image, DecodedImage) else np.asarray(image))
        return MediaItem(name, size, family.image_sizes(processor, size), tokens, separators, pixels)


def _timed(function: Callable[..., T], *args: Any) -> tuple[T, float]:
    """The result, and the seconds that it took."""
    began = time.perf_counter()
    return function(*args), time.perf_counter() - began
