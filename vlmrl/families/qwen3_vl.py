"""Qwen3-VL, dense and as a mixture of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from vlmrl.families.base import TINY_HEAD_DIM, tiny_rope
from vlmrl.families.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    tiny_config_class = "Qwen3VLConfig"
    tiny_model_class = "Qwen3VLForConditionalGeneration"
    tiny_processor_class = "Qwen3VLProcessor"
    tiny_video_processor_class = "Qwen3VLVideoProcessor"
    tiny_patch_size = 16
    tiny_text: ClassVar[dict[str, Any]] = {
        "head_dim": TINY_HEAD_DIM,
        **tiny_rope(mrope_section=[6, 5, 5], mrope_interleaved=True),
    }

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": text_width}
        return sizes | {"num_position_embeddings": 16 * 16, "deepstack_visual_indexes": [0]}


class Qwen3VLMoe(Qwen3VL):
    router = "Qwen3VLMoeTextTopKRouter"
    transposed_weights = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    tiny_config_class = "Qwen3VLMoeConfig"
    tiny_model_class = "Qwen3VLMoeForConditionalGeneration"
    tiny_text: ClassVar[dict[str, Any]] = Qwen3VL.tiny_text | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,  # as in the published models; transformers knows no other way, servers read it
    }

    @classmethod
    def tiny_vision(cls, width: int, text_width: int) -> dict[str, Any]:
        # Inference servers expect three deepstack layers, as in the published models.
        return super().tiny_vision(width, text_width) | {"deepstack_visual_indexes": [0, 1, 2]}
