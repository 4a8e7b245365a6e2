"""Models with random weights of a true shape, Qwen3-VL-2B's, so that benchmarks need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen3VLConfig

from vlmrl.config import Lora, Model
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel, load_reader
from vlmrl.model.lora import add_lora
from vlmrl.model.policy import Policy
from vlmrl.plan.published_models import PUBLISHED


def qwen3_vl_2b(ids: dict[str, int]) -> Qwen3VLConfig:
    """The config of Qwen/Qwen3-VL-2B-Instruct, with the special tokens' ids of another tokenizer's vocabulary ``ids``."""
    fields: dict[str, Any] = PUBLISHED["Qwen/Qwen3-VL-2B-Instruct"]
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"]}
    return Qwen3VLConfig(
        text_config=fields["text_config"] | ends,
        vision_config=fields["vision_config"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=fields["tie_word_embeddings"],
        architectures=["Qwen3VLForConditionalGeneration"],  # by which servers choose their class
    )


def write_2b(folder: Path, max_pixels: int = 1024 * 1024) -> Path:
    """A model folder with the 2B's config and the tiny models' tokenizer and processor, but no weights.

    Load it with ``Model(path=f"random:{folder}")``. The tokenizer has 500 of the 151,936 ids; it decodes the others to
    nothing.
    """
    tiny.build(folder, "qwen3_vl", max_pixels=max_pixels)
    (folder / "model.safetensors").unlink()
    qwen3_vl_2b(AutoTokenizer.from_pretrained(folder).get_vocab()).save_pretrained(folder)
    return folder


def load_random(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    lora: Lora | None = None,
    max_image_pixels: int | None = None,
) -> LoadedModel:
    """A model of ``folder``'s config whose weights are drawn on ``device`` in ``dtype``: no copy in float32 is made on the host."""
    config: Any = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if lora is not None and lora.rank:
        add_lora(model, lora)
    reader = load_reader(Model(path=str(folder), max_image_pixels=max_image_pixels), folder.parent)
    return LoadedModel(**vars(reader), policy=Policy(model, reader.image_processor).eval())
