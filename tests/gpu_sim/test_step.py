"""The trainer's own step on a simulated GPU: what it reads back, and so waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "step_script.py"

TEXT = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 151936}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]}}
VISION = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256}
IDS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}  # of 128 numbers each
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES = {  # the text and the vision config
    "qwen3_vl": (TEXT | {"head_dim": 64}, VISION | DEEPSTACK),
    "qwen3_vl_moe": (TEXT | {"head_dim": 64} | EXPERTS, VISION | DEEPSTACK),
    "qwen2_5_vl": (TEXT, VISION | {"fullatt_block_indexes": [1]}),
    "qwen3_5": (TEXT | {"head_dim": 64, "full_attention_interval": 2} | RECURRENT, VISION),
    "qwen2_vl": (TEXT, {"embed_dim": 128, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 256}),
}


def tiny_config(family: str) -> dict:
    text, vision = FAMILIES[family]
    return {"model_type": family, **IDS, "text_config": text, "vision_config": vision}


def waits(gpu, config: dict, *cases: dict, stance: str = "default") -> list[int]:
    """How often the host waits for the GPU in the second step of each case, which leaves no memory behind that the first has not.

    The cases run in one process, whose kernels are compiled once.
    """
    usual = {"vision_depth": 4, "micro_batches": 2, "mini_batches": 1, "corrections": False}
    done = gpu.run(SCRIPT, json.dumps(config), json.dumps([usual | case for case in cases]), stance)
    counts = []
    for first, second in json.loads(done.stdout.splitlines()[-1]):
        assert second["after"] == first["after"]
        counts.append(second["waits"])
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_waits_as_often_with_more_vision_blocks(simulated_gpu, family):
    """Vision blocks have no compiled kernels, so those of the decoder layers are not compiled."""
    cases = {"vision_depth": 4}, {"vision_depth": 12}
    few, many = waits(simulated_gpu, tiny_config(family), *cases, stance="force_eager")
    assert few == many


@pytest.mark.long
def test_the_host_waits_as_often_for_many_micro_batches_as_for_few(triton_gpu):
    """Of two mini-batches, the second is scored before the first one's optimizer step."""
    many = {"micro_batches": 6}
    cases = [{}, many, many | {"corrections": True}, {"mini_batches": 2}, many | {"mini_batches": 2}]
    one, *of_one, two, of_two = waits(triton_gpu, tiny_config("qwen3_vl"), *cases)
    assert of_one == [one, one] and of_two == two


@pytest.mark.long
def test_a_step_of_the_2b_waits_five_times(triton_gpu, shared):
    """For finite logprobs, the metrics, the loss, the gradient norm and the logprobs before the update."""
    path = shared / "data/qwen/configs/Qwen3-VL-2B-Instruct.config.json"
    assert waits(triton_gpu, json.loads(path.read_text()), {"vision_depth": 24}) == [5]
