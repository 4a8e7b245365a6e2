"""Qwen2-VL."""

from __future__ import annotations

from typing import Any, ClassVar

from vlmrl.families.base import tiny_rope
from vlmrl.families.qwen_vl import QwenVL


class Qwen2VL(QwenVL):
    tiny_config_class = "Qwen2VLConfig"
    tiny_model_class = "Qwen2VLForConditionalGeneration"
    tiny_processor_class = "Qwen2VLProcessor"
    tiny_video_processor_class = "Qwen2VLVideoProcessor"
    tiny_patch_size = 14
    tiny_text: ClassVar[dict[str, Any]] = tiny_rope(mrope_section=[6, 5, 5])

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        return {"embed_dim": width, "mlp_ratio": 4, "hidden_size": text_width}
