"""Images: from any source to a content hash, tensors and an engine payload, each made once.

The turn loop asks :class:`MediaStore` for every image of a prompt or an observation and keeps the :class:`MediaItem`
it gets. Packing merges the items' tensors with :func:`merge_mm_inputs`. The store itself keeps only weak references: a
image lives as long as a trajectory or sample that shows it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from vlmrl.model.families.base import Family, Size
from vlmrl.multimodal.images import content_hash, image_size, load_image, source_key
from vlmrl.types import ImageSource, MediaItem
from vlmrl.utils.threads import DaemonPool


class Measure(NamedTuple):
    """How the model will see an image of the size ``given``: its size then, and its visual tokens. Sizes are (width, height)."""

    given: tuple[int, int]
    shown: tuple[int, int]
    num_tokens: int


class MediaStore:
    """Makes each distinct image's :class:`MediaItem` once, whoever asks for it and however often.

    ``image_processor`` is the model's own; ``max_pixels`` lowers its limit. ``transform``, applied to each decoded
    image, serves controls such as :func:`vlmrl.multimodal.images.blank`. ``seen`` counts the images asked for, ``processed``
    those that went through the processor.
    """

    def __init__(
        self,
        family: Family,
        image_processor: Any,
        *,
        max_pixels: int | None = None,
        transform: Callable[[Image.Image], Image.Image] | None = None,
        threads: int = 4,
    ) -> None:
        self._family = family
        self._processor = image_processor
        self._max_pixels = max_pixels
        self._transform = transform
        self._pool = DaemonPool("media", threads)
        self._lock = threading.Lock()
        self._items: weakref.WeakValueDictionary[str, MediaItem] = weakref.WeakValueDictionary()
        self._ids: dict[str, str] = {}  # source key -> content hash
        self._pending: dict[
            str, Future[MediaItem]
        ] = {}  # by source key while loading, by content hash while processing
        self.seen = 0
        self.processed = 0

    async def get(self, source: ImageSource) -> MediaItem:
        """The image's item. Loading and processing run in the store's threads, never in the event loop."""
        return await self._pool.run(self.load, source)

    def measure(self, source: ImageSource) -> Measure:
        """What :meth:`load` would make of the image's size, without decoding it."""
        given = image_size(source)
        shown = self._resized(given)
        return Measure(given, shown, self._family.num_tokens(self._processor, shown))

    def close(self) -> None:
        """Let the store's threads end."""
        self._pool.close()

    def load(self, source: ImageSource) -> MediaItem:
        """The same, here and now; safe from any thread. Raises ValueError for what is no image."""
        with self._lock:
            self.seen += 1
        key = source_key(source)
        return self._once(key, lambda: self._load(key, source))

    def _once(self, key: str, make: Callable[[], MediaItem]) -> MediaItem:
        """The living item of a source key or content hash; else what ``make`` gives to one thread while others wait."""
        with self._lock:
            item = self._items.get(self._ids.get(key, key))
            if item is not None:
                return item
            pending = self._pending.get(key)
            if pending is None:
                mine = self._pending[key] = Future()
        if pending is not None:
            return pending.result()
        try:
            item = make()
            mine.set_result(item)
            return item
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[key]

    def _load(self, key: str, source: ImageSource) -> MediaItem:
        image = load_image(source)
        if self._transform is not None:
            image = self._transform(image)
        content = content_hash(image)
        item = self._once(content, lambda: self._process(content, image))
        with self._lock:
            self._ids[key] = content
        weakref.finalize(item, self._ids.pop, key, None).atexit = False
        return item

    def _resized(self, size: Size) -> Size:
        return self._family.resized(self._processor, size, self._max_pixels)

    def _process(self, content: str, image: Image.Image) -> MediaItem:
        """Resize to what the processor would choose, with its own filter, then let it make the tensors."""
        family, processor, size = self._family, self._processor, self._resized(image.size)
        if size != image.size:
            pixels = tv.pil_to_tensor(image)
            image = tv.to_pil_image(tv.resize(pixels, list(size[::-1]), tv.InterpolationMode.BICUBIC, antialias=True))
        inputs = family.image_inputs(processor, image)
        item = MediaItem(content, image, inputs, family.num_tokens(processor, size), family.separators(processor, size))
        with self._lock:
            self.processed += 1
            self._items[content] = item
        return item


def merge_mm_inputs(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """The items' tensors joined along their first dimension: one ``torch.cat`` per key.

    Two images of 16 and 24 patches give ``pixel_values`` ``[40, patch]`` and ``image_grid_thw`` ``[2, 3]``. Raises
    ValueError where a key is missing from some items or holds no tensor.
    """
    if not items:
        return {}
    keys = items[0].mm_inputs.keys()
    for item in items:
        if item.mm_inputs.keys() != keys:
            raise ValueError(
                f"mm_inputs of image {item.id} have the keys {sorted(item.mm_inputs)}, but those of image "
                f"{items[0].id} have {sorted(keys)}: all images of a batch must come from one processor."
            )
        for key, value in item.mm_inputs.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"mm_inputs[{key!r}] of image {item.id} must be a tensor, but it is a {type(value).__name__}."
                )
    return {key: torch.cat([item.mm_inputs[key] for item in items]) for key in keys}
