"""What goes through the object store: its large parts are arrays, which a process maps into its memory instead of copying them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL import Image

from vlmrl.engine.base import Request
from vlmrl.types import MediaItem, Sample

Shown = TypeVar("Shown", Sample, Request)


@dataclass(frozen=True)
class WireTensor:
    """A tensor as bytes, which may be of a dtype that numpy does not know."""

    data: np.ndarray
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WireTensor:
        flat = (
            tensor.detach().reshape(-1).to("cpu", copy=True)
        )  # FSDP resizes its own, which numpy would forbid from then on
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape)

    def tensor(self) -> torch.Tensor:
        """The tensor over the same memory, where nothing may be written."""
        with warnings.catch_warnings(action="ignore"):  # of just that
            return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class SerializedImage:
    """A :class:`~vlmrl.types.MediaItem` as arrays; ``pixels`` are ``[height, width, 3]``."""

    id: str
    pixels: np.ndarray
    mm_inputs: dict[str, WireTensor]
    num_tokens: int
    separators: dict[int, int]

    @classmethod
    def of(cls, item: MediaItem) -> SerializedImage:
        inputs = {name: WireTensor.of(value) for name, value in item.mm_inputs.items()}
        return cls(item.id, np.asarray(item.image), inputs, item.num_tokens, item.separators)

    def item(self) -> MediaItem:
        inputs = {name: value.tensor() for name, value in self.mm_inputs.items()}
        return MediaItem(self.id, Image.fromarray(self.pixels), inputs, self.num_tokens, self.separators)


Weights = list[tuple[str, WireTensor]]


def buckets(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int, dtype: torch.dtype) -> Iterator[Weights]:
    """Weights in parts of about ``max_bytes``; what is float32 is rounded to ``dtype`` first."""
    bucket: Weights = []
    size = 0
    for name, weight in weights:
        bucket.append((name, WireTensor.of(weight.to(dtype) if weight.dtype == torch.float32 else weight)))
        size += bucket[-1][1].data.nbytes
        if size >= max_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@dataclass(frozen=True)
class SamplePayload(Generic[Shown]):
    """Rows without their images: row ``i`` shows those of ``shows[i]``, numbers of the distinct images that travel apart."""

    rows: list[Shown]
    shows: list[list[int]]

    @classmethod
    def of(cls, rows: Sequence[Shown]) -> tuple[SamplePayload[Shown], list[MediaItem]]:
        """The crate, and the distinct images."""
        numbers: dict[str, int] = {}
        images: list[MediaItem] = []
        for row in rows:
            for item in row.media:
                if numbers.setdefault(item.id, len(images)) == len(images):
                    images.append(item)
        shows = [[numbers[item.id] for item in row.media] for row in rows]
        return cls([replace(row, media=[]) for row in rows], shows), images

    def unpack(self, images: Sequence[MediaItem]) -> list[Shown]:
        """The rows with their images again."""
        pairs = zip(self.rows, self.shows, strict=True)
        return [replace(row, media=[images[number] for number in shown]) for row, shown in pairs]
