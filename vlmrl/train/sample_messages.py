"""Samples on their way from rank 0 to the other ranks, which get each row and each image once for all calls on a batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from vlmrl.types import MediaItem, Sample

CALLS_KEPT = 3  # a row or an image that so many calls did not use is dropped

Row = tuple[Sample, list[str]]
"""A sample without images and advantage, and the ids of its images."""


@dataclass(frozen=True)
class SampleMessage:
    """The samples of one call: their rows by hash with their advantages, and the rows and images that are new to the ranks."""

    rows: list[tuple[str, float | list[float] | None]]
    new_rows: dict[str, bytes]
    """Pickled :data:`Row` objects by their hash."""
    new_images: dict[str, MediaItem]


class SampleCache:
    """The rows and images that the other ranks have. Rank 0 and the others drop the same ones after the same call."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._images: dict[str, MediaItem] = {}
        self._last_use: dict[str, int] = {}
        self._calls = 0

    def pack(self, samples: Sequence[Sample]) -> SampleMessage:
        """The message for the other ranks. Called on rank 0."""
        message, rows = SampleMessage([], {}, {}), {}
        for sample in samples:
            row = (replace(sample, media=[], advantage=None), sample.image_ids)  # an advantage is set between two calls
            data = pickle.dumps(row)
            key = blake2b(data, digest_size=16).hexdigest()
            message.rows.append((key, sample.advantage))
            if key not in self._rows:
                message.new_rows[key], rows[key] = data, row
            message.new_images.update({item.id: item for item in sample.media if self._images.get(item.id) is not item})
        self._keep(message, rows)
        return message

    def unpack(self, message: SampleMessage) -> list[Sample]:
        """The samples of a message. Called on the other ranks."""
        self._keep(message, {key: pickle.loads(data) for key, data in message.new_rows.items()})
        samples = []
        for key, advantage in message.rows:
            row, images = self._rows[key]
            samples.append(replace(row, media=[self._images[each] for each in images], advantage=advantage))
        return samples

    def forget(self) -> None:
        """Drop everything: the batch has been trained on."""
        self._rows, self._images, self._last_use = {}, {}, {}

    def _keep(self, message: SampleMessage, new_rows: dict[str, Row]) -> None:
        self._calls += 1
        self._rows |= new_rows
        self._images |= message.new_images
        for key, _ in message.rows:
            self._last_use |= dict.fromkeys([key, *self._rows[key][1]], self._calls)
        for key in [key for key, call in self._last_use.items() if self._calls - call >= CALLS_KEPT]:
            del self._last_use[key]
            for kept in (self._rows, self._images):
                kept.pop(key, None)
