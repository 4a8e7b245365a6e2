"""The media store: each distinct image is loaded, hashed, resized and processed once.

The turn loop gets a :class:`MediaItem` for every image of a prompt or an observation. Packing merges the items' tensors with
:func:`merge_mm_inputs`. The store keeps only weak references: an item exists as long as a trajectory or sample holds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image

from vlmrl.model.families.base import Family, Size
from vlmrl.multimodal.images import content_hash, image_size, load_image, source_key
from vlmrl.types import ImageSource, MediaItem
from vlmrl.utils.threads import DaemonPool, SingleFlight


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
    that went through the processor.
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
        # By source key while an image is loaded, by content hash while it is processed.
        self._flight: SingleFlight[MediaItem] = SingleFlight()
        self.seen = 0
        self.processed = 0

    async def get(self, source: ImageSource) -> MediaItem:
        """The image's item. Loading and processing run in the store's threads, never in the event loop."""
        return await self._pool.run(self.load, source)

    def measure(self, source: ImageSource) -> Measure:
        """The size and token count that the image would have after :meth:`load`, without decoding it."""
        given = image_size(source)
        shown = self._resized(given)
        return Measure(given, shown, self._family.num_tokens(self._processor, shown))

    def close(self) -> None:
        """End the store's threads."""
        self._pool.close()

    def load(self, source: ImageSource) -> MediaItem:
        """As :meth:`get`, in the calling thread. Raises ValueError if the source is no image."""
        with self._lock:
            self.seen += 1
        key = source_key(source)
        return self._once(key, lambda: self._load(key, source))

    def _once(self, key: str, make: Callable[[], MediaItem]) -> MediaItem:
        """The item of a source key or content hash if it still exists; else ``make()``, run by one thread while others wait."""
        return self._flight.get(key, self._find, make)[0]

    def _find(self, key: str) -> MediaItem | None:
        with self._lock:
            return self._items.get(self._ids.get(key, key))

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
        """Resize as the processor would, then make the tensors."""
        family, processor, size = self._family, self._processor, self._resized(image.size)
        if size != image.size:
            image = family.resize(image, size)
        inputs = family.image_inputs(processor, image)
        item = MediaItem(content, image, inputs, family.num_tokens(processor, size), family.separators(processor, size))
        with self._lock:
            self.processed += 1
            self._items[content] = item
        return item


def merge_mm_inputs(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """The items' tensors concatenated along their first dimension: one ``torch.cat`` per key.

    Two images of 16 and 24 patches give ``pixel_values`` ``[40, patch]`` and ``image_grid_thw`` ``[2, 3]``. Raises
    ValueError if a key is missing from some items or is no tensor.
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
