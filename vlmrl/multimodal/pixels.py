"""Storage of an image's pixels: the kinds of :class:`vlmrl.types.Pixels`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ArrayPixels:
    """Pixels in an array."""

    array: np.ndarray

    def read(self) -> np.ndarray:
        return self.array


class NoPixels:
    """In place of pixels that this process does not need: it only counts the image's tokens."""

    def read(self) -> np.ndarray:
        raise RuntimeError(
            "this process did not get the image's pixels, since none of the rows that it computes shows the image."
        )
