"""The embedded engine's image features: each distinct image is encoded once per policy version."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator

from vlmrl.families.base import ImageFeatures
from vlmrl.model.policy import Policy
from vlmrl.types import MediaItem


class ImageFeatureCache:
    """Encodes with ``policy``, at most ``budget`` visual tokens (or one image) at once. ``encoded`` counts images.

    ``seconds`` adds up the time of encoding; on a GPU, of launching it.

    Features are kept as long as their :class:`MediaItem` exists.
    """

    def __init__(self, policy: Policy, budget: int) -> None:
        self.encoded = 0
        self.seconds = 0.0
        self._policy = policy
        self._budget = budget
        self._known: dict[str, ImageFeatures] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, media: Iterable[MediaItem]) -> dict[str, ImageFeatures]:
        """The features of ``media`` by content hash."""
        known = self._known  # `clear` replaces the dict: features that are computed now never get into the next one
        items = {item.id: item for item in media}
        found = {name: known[name] for name in items if name in known}
        for part in self._parts([item for name, item in items.items() if name not in found]):
            began = time.perf_counter()
            new = dict(zip([item.id for item in part], self._policy.encode_images(part), strict=True))
            self.seconds += time.perf_counter() - began
            self.encoded += len(new)
            found |= new
            for item in part:
                known[item.id] = new[item.id]
                weakref.finalize(item, known.pop, item.id, None).atexit = False
        return found

    def clear(self) -> None:
        """Drop everything after a weight update."""
        self._known = {}

    def _parts(self, items: list[MediaItem]) -> Iterator[list[MediaItem]]:
        part: list[MediaItem] = []
        for item in items:
            if part and sum(other.num_tokens for other in part) + item.num_tokens > self._budget:
                yield part
                part = []
            part.append(item)
        if part:
            yield part
