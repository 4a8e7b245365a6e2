"""The model's inputs of images, made from their pixels where a prefill or a micro-batch is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlmrl.families.base import Family
from vlmrl.types import MediaItem, to_device


def merge_mm_inputs(
    items: Sequence[MediaItem], family: Family, image_processor: Any, device: torch.device
) -> dict[str, torch.Tensor]:
    """The processor's outputs for the items, on ``device``, and their sizes, on the host: one ``torch.cat`` for each of these.

    Two images of 16 and 24 patches give ``pixel_values`` ``[40, patch]`` and ``image_grid_thw`` ``[2, 3]``. The uint8 pixels cross to
    the device; floats exist there only, as long as the result does.

    Raises:
        ValueError: the items' sizes have different names, or something among the result is no tensor.
    """
    if not items:
        return {}
    first = items[0]
    for item in items:
        if item.sizes.keys() != first.sizes.keys():
            raise ValueError(
                f"image {item.id} has the sizes {sorted(item.sizes)}, but image {first.id} has {sorted(first.sizes)}: all images of "
                "a batch must come from one processor."
            )
    sizes = {key: torch.cat([item.sizes[key] for item in items]) for key in first.sizes}
    merged = sizes | family.image_inputs(image_processor, [_on_device(item, device) for item in items])
    for key, value in merged.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"the family's image_inputs must be tensors, but {key!r} is a {type(value).__name__}.")
    return merged


def _on_device(item: MediaItem, device: torch.device) -> torch.Tensor:
    """The pixels ``[3, height, width]``."""
    return to_device(torch.tensor(item.pixels.read()), device).permute(2, 0, 1)  # a copy: the pixels are shared
