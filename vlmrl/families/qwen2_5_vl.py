"""Qwen2.5-VL."""

from __future__ import annotations

from typing import Any, ClassVar

from vlmrl.families.base import tiny_rope
from vlmrl.families.qwen_vl import QwenVL


class Qwen25VL(QwenVL):
    tiny_config_class = "Qwen2_5_VLConfig"
    tiny_model_class = "Qwen2_5_VLForConditionalGeneration"
    tiny_processor_class = "Qwen2_5_VLProcessor"
    tiny_video_processor_class = "Qwen2VLVideoProcessor"
    tiny_patch_size = 14
    tiny_text: ClassVar[dict[str, Any]] = tiny_rope(mrope_section=[4, 6, 6])

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        windows = {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": text_width} | windows
