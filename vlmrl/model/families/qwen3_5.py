"""Qwen3.5: three of four decoder layers are gated linear attention, whose recurrent state no mask can branch or reset."""

from __future__ import annotations

from typing import Any, ClassVar

from vlmrl.model.families.base import TINY_HEAD_DIM, tiny_rope
from vlmrl.model.families.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    recurrent = True
    tiny_config_class = "Qwen3_5Config"
    tiny_model_class = "Qwen3_5ForConditionalGeneration"
    tiny_text: ClassVar[dict[str, Any]] = {
        "head_dim": TINY_HEAD_DIM,
        **tiny_rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": TINY_HEAD_DIM,
        "linear_value_head_dim": TINY_HEAD_DIM,
    }

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        fields = super().tiny_vision(width, text_width)
        del fields["deepstack_visual_indexes"]  # it has no deepstack
        return fields
