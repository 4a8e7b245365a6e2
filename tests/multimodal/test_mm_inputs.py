"""The tensors that are made from items' pixels: their memory. The suite of families compares their values."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from testing.tensor_memory import LiveBytes

from vlmrl.config import Model
from vlmrl.model.loading import load_reader
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.multimodal.store import MediaStore

CPU = torch.device("cpu")


def test_patches_are_written_once(tmp_path: Path):
    """Two equal frames of floats take eight times the pixels; beside them there is never more than one image as floats."""
    reader = load_reader(Model(path="tiny:qwen3_vl", max_image_pixels=96 * 96), tmp_path)
    store = MediaStore(reader.family, reader.image_processor, max_pixels=96 * 96, memory=PixelMemory(2**30))
    items = [store.load(Image.effect_noise((96, 96), 50 + seed).convert("RGB")) for seed in range(12)]
    pixels = sum(item.pixels.read().nbytes for item in items)
    with LiveBytes(lambda tensor: True) as live:
        made = merge_mm_inputs(items, reader.family, reader.image_processor, CPU)
    assert made["pixel_values"].untyped_storage().nbytes() == 8 * pixels
    # The result, the pixels, and an image's floats before and after each operation.
    assert live.peak < (8 + 1 + 3 * 4 / 12) * pixels
