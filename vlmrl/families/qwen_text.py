"""The text models: Qwen2 and Qwen2.5 (one ``model_type``), and Qwen3."""

from __future__ import annotations

from typing import Any, ClassVar

from vlmrl.families.base import TINY_HEAD_DIM, Family, tiny_rope


class Qwen2(Family):
    tiny_config_class = "Qwen2Config"
    tiny_model_class = "Qwen2ForCausalLM"
    tiny_text: ClassVar[dict[str, Any]] = tiny_rope()


class Qwen3(Family):
    tiny_config_class = "Qwen3Config"
    tiny_model_class = "Qwen3ForCausalLM"
    tiny_text: ClassVar[dict[str, Any]] = {"head_dim": TINY_HEAD_DIM, **tiny_rope()}
