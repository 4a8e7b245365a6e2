"""Sends samples to the ranks: from rank 0 under torchrun, from the driver under Ray.

Each row is sent once for all calls on a batch. Every rank needs all rows, since the plan of micro-batches depends on the rows' lengths
and images, but under torchrun an image's pixels are sent, once, only to the ranks that compute it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b

from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.multimodal.pixels import NoPixels
from vlmrl.types import MediaItem, Sample

LAST_CALL = "step"  # on the samples of a batch: the ranks keep them until then
CALLS_KEPT = 3  # a row that so many calls did not use is dropped, and an image that no other row shows

Row = tuple[Sample, list[list[str]]]
"""A sample without images and advantage, and the ids of the images of it and of each of its teacher's rows."""
Images = dict[str, MediaItem]


@dataclass(frozen=True)
class RowMessage:
    """The rows of one call: by hash with their advantages, and those that are new to the receivers."""

    rows: list[tuple[str, float | list[float] | None]]
    new_rows: dict[str, bytes]
    """Pickled :data:`Row` objects by their hash."""


class RowCache:
    """The rows that the receivers have. Sender and receivers drop the same ones after the same call."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._last_use: dict[str, int] = {}
        self._calls = 0

    def pack(self, samples: Sequence[Sample]) -> RowMessage:
        """The message of one call. Called by the sender."""
        message, new = RowMessage([], {}), {}
        for sample in samples:
            # The advantage is set between two calls.
            row = (replace(_without_images(sample), advantage=None), list(map(_ids, _seen(sample))))
            data = pickle.dumps(row)
            key = blake2b(data, digest_size=16).hexdigest()
            message.rows.append((key, sample.advantage))
            if key not in self._rows:
                message.new_rows[key], new[key] = data, row
        self._keep(message, new)
        return message

    def unpack(self, message: RowMessage) -> list[Row]:
        """The rows of a message, with their advantages. Called by the receivers."""
        self._keep(message, {key: pickle.loads(data) for key, data in message.new_rows.items()})
        return [
            (replace(sample, advantage=advantage), names)
            for (sample, names), advantage in ((self._rows[key], advantage) for key, advantage in message.rows)
        ]

    def forget(self) -> None:
        """Drop everything: the batch has been trained on."""
        self._rows, self._last_use = {}, {}

    def shown(self) -> set[str]:
        """The images of all rows that are kept."""
        return {name for _, each in self._rows.values() for names in each for name in names}

    def keys(self) -> Set[str]:
        return self._rows.keys()

    def _keep(self, message: RowMessage, new: dict[str, Row]) -> None:
        self._calls += 1
        self._rows |= new
        self._last_use |= {key: self._calls for key, _ in message.rows}
        for key in [key for key, call in self._last_use.items() if self._calls - call >= CALLS_KEPT]:
            del self._last_use[key], self._rows[key]


def with_images(rows: Sequence[Row], images: Mapping[str, MediaItem]) -> list[Sample]:
    """The samples of rows whose images are given by id."""
    samples = []
    for sample, names in rows:
        media, *others = [[images[name] for name in each] for each in names]
        seen = [
            None if row is None else replace(row, media=shown)
            for row, shown in zip(sample.teacher_rows, others, strict=True)
        ]
        samples.append(replace(sample, media=media, teacher_rows=seen))
    return samples


def _without_images(sample: Sample) -> Sample:
    seen = [None if row is None else replace(row, media=[]) for row in sample.teacher_rows]
    return replace(sample, media=[], teacher_rows=seen)


def _seen(sample: Sample) -> list[list[MediaItem]]:
    """The images of a sample and of each of its teacher's rows."""
    return [sample.media, *([] if row is None else row.media for row in sample.teacher_rows)]


def _media(samples: Sequence[Sample]) -> Iterator[MediaItem]:
    return (item for sample in samples for media in _seen(sample) for item in media)


def _ids(media: Sequence[MediaItem]) -> list[str]:
    return [item.id for item in media]


@dataclass(frozen=True)
class SampleMessage:
    """The rows of one call, and the images that are new to the ranks."""

    rows: RowMessage
    new_images: Images
    """Without pixels."""


class SampleCache:
    """The rows and images that the other ranks have under torchrun. Rank 0 and the others drop the same ones after the same call."""

    def __init__(self) -> None:
        self._memory = PixelMemory()  # of images that arrive
        self.rows = RowCache()
        self.images: Images = {}
        self._ranks_with: dict[str, set[int]] = {}  # on rank 0: the ranks that have an image's pixels

    def pack(self, samples: Sequence[Sample], rows_by_rank: Sequence[Set[int]]) -> tuple[SampleMessage, list[Images]]:
        """The message for all other ranks, and the whole images for each rank. Called on rank 0.

        ``rows_by_rank``: the indices of the samples that each rank computes.
        """
        new = {item.id: item for item in _media(samples) if self.images.get(item.id) is not item}
        message = SampleMessage(self.rows.pack(samples), {name: _without_pixels(item) for name, item in new.items()})
        self._ranks_with |= {name: {0} for name in new}
        self._keep(new)
        return message, [self._missing(samples, rank, needed) for rank, needed in enumerate(rows_by_rank)]

    def unpack(self, message: SampleMessage, images: Images) -> list[Sample]:
        """The samples of a message, with the whole images that came for this rank. Called on the other ranks."""
        rows = self.rows.unpack(message.rows)
        held = {name: replace(item, pixels=self._memory.hold(item.pixels.read())) for name, item in images.items()}
        self._keep(message.new_images | held)
        return with_images(rows, self.images)

    def forget(self) -> None:
        """Drop everything: the batch has been trained on."""
        self.rows.forget()
        self.images, self._ranks_with = {}, {}

    def _missing(self, samples: Sequence[Sample], rank: int, needed: Set[int]) -> Images:
        """The images of a rank's rows whose pixels it does not have. From now on it has them."""
        shown = {item.id: item for item in _media([samples[row] for row in needed])}
        missing = {name: item for name, item in shown.items() if rank not in self._ranks_with[name]}
        for name in missing:
            self._ranks_with[name].add(rank)
        return missing

    def _keep(self, images: Images) -> None:
        self.images |= images
        for name in self.images.keys() - self.rows.shown():
            del self.images[name]
            self._ranks_with.pop(name, None)


def _without_pixels(item: MediaItem) -> MediaItem:
    return replace(item, pixels=NoPixels())
