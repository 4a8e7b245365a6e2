"""The index of model families: one class for each ``model_type``. `base.py` is the interface that they implement."""

from __future__ import annotations

from typing import Any

from vlmrl.families.base import Family
from vlmrl.families.glm4v import Glm4V, Glm46V
from vlmrl.families.qwen2_5_vl import Qwen25VL
from vlmrl.families.qwen2_vl import Qwen2VL
from vlmrl.families.qwen3_5 import Qwen35
from vlmrl.families.qwen3_vl import Qwen3VL, Qwen3VLMoe
from vlmrl.families.qwen_text import Qwen2, Qwen3
from vlmrl.families.smolvlm import SmolVLM

FAMILIES: dict[str, type[Family]] = {
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VLMoe,
    "qwen3_5": Qwen35,
    "glm4v": Glm4V,
    "glm46v": Glm46V,
    "smolvlm": SmolVLM,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}
"""By the ``model_type`` of a Hugging Face config. ``FAMILIES["my_type"] = MyFamily`` adds one from outside the package."""


def family_of(config: Any) -> Family:
    """The family of a model with this Hugging Face config. Raises ValueError for a ``model_type`` without a family."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model type {config.model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[config.model_type](config)
