"""Kernels of a vision block for one image and for many, on a simulated GPU."""

from __future__ import annotations

import json

import pytest

from vlmrl.model import image_attention

pytestmark = pytest.mark.slow

SCRIPT = """
import json
import torch
from testing.gpu_sim import device_counts
from transformers import AutoConfig, AutoModelForImageTextToText
from vlmrl.model import image_attention
from vlmrl.model.policy import Policy

TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1000}
VISION = {"depth": 2, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 64}
config = AutoConfig.for_model("qwen3_vl", text_config=TEXT, vision_config=VISION | {"deepstack_visual_indexes": [0]})
with torch.device("cuda"):
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
family, visual = Policy(model).family, model.model.visual
blocks = visual.blocks


def kernels(depth, sides):
    visual.blocks = blocks[:depth]
    grids = torch.tensor([[1, side, side] for side in sides])
    inputs = {"pixel_values": torch.zeros(int(grids.prod(1).sum()), 1536, device="cuda"), "image_grid_thw": grids}
    counts = device_counts()
    features = family.encode_images(model, inputs)
    forward = device_counts()
    torch.cat([image.embeds for image in features]).sum().backward()
    both = device_counts()
    return [now["launches"] - counts["launches"] for now in (forward, both)] + [both["syncs"] - counts["syncs"]]


def of_a_block(sides):
    return [more - one for more, one in zip(kernels(2, sides), kernels(1, sides))]


kernels(2, [4])  # what happens at a first call
cases = {"one": [16], "many": [16] * 128, "mixed": [8, 16, 12, 16] * 32}
found = {}
for implementation in ("sdpa", image_attention.NAME):
    model.config.vision_config._attn_implementation = implementation
    found[implementation] = {name: of_a_block(sides) for name, sides in cases.items()}
print(json.dumps(found))
"""


def test_a_block_launches_as_many_kernels_for_many_images_as_for_one(simulated_gpu):
    found = json.loads(simulated_gpu.run(SCRIPT).stdout.splitlines()[-1])
    loop, ours = found["sdpa"], found[image_attention.NAME]
    assert ours["many"] == ours["mixed"] == ours["one"]
    assert ours["one"][2] == 0  # and the host does not wait
    assert loop["many"][0] > 100 + ours["many"][0]
