"""Qwen3.5: three of four decoder layers are gated linear attention, with a convolution and a recurrent state (gated delta rule)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from vlmrl.families.base import TINY_HEAD_DIM, tiny_rope
from vlmrl.families.forks import Forks
from vlmrl.families.qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    recurrent = True
    forked_layers = "Qwen3_5GatedDeltaNet"
    float32_weights = ("linear_attn.A_log", "linear_attn.norm.weight")
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

    @classmethod
    def tiny_config(cls, text: dict[str, Any], vision_width: int, vision_depth: int, tokenizer: Any) -> Any:
        """With the interval beside ``layer_types``, as published configs have it: servers read it."""
        config = super().tiny_config(text, vision_width, vision_depth, tokenizer)
        config.text_config.full_attention_interval = cls.tiny_text["full_attention_interval"]
        return config

    @classmethod
    def tiny_model(cls, config: Any) -> Any:
        """transformers draws decays that forget within a token; here, as in published models, heads remember 2 to 100 tokens."""
        model = super().tiny_model(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".A_log"):
                    parameter.copy_(torch.linspace(-5, -1, len(parameter)))
        return model

    def run_forked(self, layer: Any, hidden: torch.Tensor, forks: Forks) -> torch.Tensor:
        """As transformers' ``Qwen3_5GatedDeltaNet.forward``, with its chunked rule for each batch of sequences."""
        mixed = forks.convolve(layer.in_proj_qkv(hidden), layer.conv1d)
        mixed = ACT2FN[layer.activation](mixed)
        decay = -layer.A_log.float().exp() * softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
        states = forks.scan(partial(_delta_rule, layer), mixed, decay, layer.in_proj_b(hidden).sigmoid())
        gate = layer.in_proj_z(hidden).unflatten(-1, (-1, layer.head_v_dim))
        normed = layer.norm(states.flatten(0, 1), gate.flatten(0, 1))
        output: torch.Tensor = layer.out_proj(normed.view(len(hidden), -1))
        return output


def _delta_rule(
    layer: Any, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule from ``state`` ``[rows, heads, key width, value width]`` over ``[rows, length, ...]``.

    Source: Gated Delta Networks, arXiv 2412.06464. A token of zeros leaves the state as it is: nothing decays, nothing is written.
    transformers takes flash-linear-attention's kernel instead of its own rule where that is installed.
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    heads = (each.unflatten(-1, (-1, layer.head_k_dim)) for each in (query, key))
    repeated = (each.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=2) for each in heads)
    output, final = torch_chunk_gated_delta_rule(
        *repeated,
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output, final
