"""The shapes of published Qwen models, so that a plan needs neither their files nor a network.

They are numbers of the `config.json` in each model's repository on the Hugging Face Hub.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Fields = dict[str, Any]


def _text(sizes: tuple[int, ...], tied: bool, **more: Any) -> Fields:
    """``sizes``: width, layers, query heads, key heads, and the width of the MLP."""
    width, layers, heads, keys, inner = sizes
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 262144,
        **more,
    }


def _qwen3(*sizes: int, tied: bool) -> Fields:
    return {"model_type": "qwen3", **_text(sizes, tied, head_dim=128)}


def _qwen3_vl(*sizes: int, tied: bool, large_tower: bool, **experts: int) -> Fields:
    kind = "qwen3_vl_moe" if experts else "qwen3_vl"
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = _text(sizes, tied, head_dim=128, model_type=f"{kind}_text", rope_parameters=rope, **experts)
    depth, hidden, inner, levels = (27, 1152, 4304, [8, 16, 24]) if large_tower else (24, 1024, 4096, [5, 11, 17])
    vision = {
        "model_type": kind,
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": levels,
        "out_hidden_size": sizes[0],
    }
    return {"model_type": kind, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _qwen2_5_vl(*sizes: int, tied: bool, vocabulary: int) -> Fields:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = _text(sizes, tied, model_type="qwen2_5_vl_text", rope_parameters=rope) | {"vocab_size": vocabulary}
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": sizes[0],
    }
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LARGE_EXPERTS = EXPERTS | {"moe_intermediate_size": 1536}
PUBLISHED: dict[str, Fields] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600, tied=False),
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl(2048, 36, 16, 2, 11008, tied=True, vocabulary=151936),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2_5_vl(3584, 28, 28, 4, 18944, tied=False, vocabulary=152064),
    "Qwen/Qwen3-VL-2B-Instruct": _qwen3_vl(2048, 28, 16, 8, 6144, tied=True, large_tower=False),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3_vl(2560, 36, 32, 8, 9728, tied=True, large_tower=False),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3_vl(4096, 36, 32, 8, 12288, tied=False, large_tower=True),
    "Qwen/Qwen3-VL-32B-Instruct": _qwen3_vl(5120, 64, 64, 8, 25600, tied=False, large_tower=True),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _qwen3_vl(2048, 48, 32, 4, 6144, tied=False, large_tower=True, **EXPERTS),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _qwen3_vl(
        4096, 94, 64, 4, 12288, tied=False, large_tower=True, **LARGE_EXPERTS
    ),
}
"""By their names on the hub. The shape of a `Thinking` model is that of its `Instruct` model."""


@contextmanager
def shape_folder(name: str) -> Iterator[str]:
    """Within the context, a folder with the config of a published model, to build it on the meta device; other names as they are."""
    fields = PUBLISHED.get(name.replace("-Thinking", "-Instruct"))
    if fields is None or Path(name).is_dir():
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        yield folder
