"""The memory plan against sums by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from math import isqrt

import pytest
import torch
from testing.trees import noise

from vlmrl.config import Algo, Cluster, Config, Lora, Model, Optim, Rollout, ServerSettings, Train
from vlmrl.model.loading import largest_image_of, load_model, shapes_of
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.placeholders import expand
from vlmrl.plan.memory_plan import MemoryPlan, Sizes, plan_memory
from vlmrl.train.ranks import Ranks

SIZES = Sizes(parameters=1000, trained_by_part={"language_model": 400}, cached=6)
PLAYED = {"rollout": Rollout(group_size=8, max_tokens=100, max_response_tokens=10), "train": Train(groups_per_batch=4)}


def test_eight_gpus_shard_weights_gradients_and_optimizer_state():
    plan = MemoryPlan.of(Config(cluster=Cluster(gpus=8), **PLAYED), SIZES, 1)
    assert plan.ranks == 8 and plan.dtype == torch.bfloat16
    assert plan.trainer == {"weights": 4000 / 8, "gradients": 1600 / 8, "optimizer state": 3200 / 8}
    assert plan.engine == {"weights": 2000, "KV cache at most": 32 * 100 * 6 * 2}
    assert "8 trainer ranks (FSDP2) on 8 GPUs of 1 node, the engine beside rank 0" in str(plan)


def test_one_rank_in_bfloat16_has_masters_and_may_keep_its_optimizer_state_on_the_host():
    config = Config(cluster=Cluster(gpus=1), optim=Optim(offload=True), algo=Algo(kl_coef=0.1), **PLAYED)
    parts = {"weights": 2000, "masters": 1600, "gradients": 1600, "reference": 2000}
    assert MemoryPlan.of(config, SIZES, 1).trainer == parts
    lora = replace(config, model=Model(lora=Lora(rank=4)))  # the reference is the model without adapters
    assert MemoryPlan.of(lora, SIZES, 1).trainer == {name: parts[name] for name in ("weights", "masters", "gradients")}


def test_in_one_process_the_engine_has_the_trainers_weights():
    plan = MemoryPlan.of(Config(model=Model(device="cpu"), **PLAYED), SIZES, 1)
    assert plan.trainer == {"weights": 4000, "gradients": 1600, "optimizer state": 3200}
    assert plan.engine == {"KV cache at most": 32 * 100 * 6 * 4}
    assert "placement one process, on cpu" in str(plan)
    under_torchrun = MemoryPlan.of(Config(model=Model(device="cpu"), **PLAYED), SIZES, 2)
    assert "on 2 ranks (FSDP2), the engine beside rank 0" in str(under_torchrun)
    assert under_torchrun.engine["weights"] == 4000


def test_an_asynchronous_run_has_max_staleness_more_batches_in_progress():
    train = replace(PLAYED["train"], max_staleness=2)
    plan = MemoryPlan.of(Config(model=Model(device="cpu"), **PLAYED | {"train": train}), SIZES, 1)
    assert plan.engine["KV cache at most"] == 3 * 32 * 100 * 6 * 4


def test_apart_half_of_the_gpus_train():
    config = Config(cluster=Cluster(gpus=8, colocate=False, nodes=2), engine="sglang")
    assert (config.cluster.num_ranks, config.cluster.num_engines) == (4, 4)
    assert "4 trainer ranks (FSDP2) and 4 SGLang servers on 8 GPUs of 2 nodes, apart" in str(
        MemoryPlan.of(config, SIZES, 1)
    )


@pytest.mark.parametrize(
    ("settings", "ranks", "engines"),
    [
        ({}, 8, 1),
        ({"train": Train(max_staleness=1)}, 8, 1),  # the embedded engine is on rank 0's GPU
        ({"engine": "sglang"}, 8, 8),
        ({"engine": "sglang", "server": ServerSettings(tp=2)}, 8, 4),
        ({"engine": "sglang", "server": ServerSettings(tp=3)}, 8, 2),
        ({"engine": "sglang", "train": Train(max_staleness=1), "server": ServerSettings(tp=2)}, 4, 2),
        ({"engine": "sglang", "server": ServerSettings(urls=("http://127.0.0.1:1",))}, 8, 8),
    ],
)
def test_eight_gpus_are_shared_where_that_is_possible_and_otherwise_divided(settings, ranks, engines):
    """Servers that run already are on none of these GPUs."""
    placed = Config(cluster=Cluster(gpus=8), **settings).resolved_cluster
    assert (placed.num_ranks, placed.num_engines) == (ranks, engines)


def test_sizes_come_from_the_shapes_alone(tiny_folder):
    model = Model(path=str(tiny_folder), lora=Lora(rank=2))
    shapes = shapes_of(model, tiny_folder.parent)
    assert {weight.device.type for weight in shapes.parameters()} == {"meta"}
    real = load_model(model, tiny_folder.parent, 0).policy
    sizes = Sizes.of(shapes, largest_image_of(model, tiny_folder.parent))
    assert sizes.parameters == sum(weight.numel() for weight in real.parameters())
    assert sizes.trained == sum(weight.numel() for weight in real.parameters() if weight.requires_grad)
    kept = [
        m for name, m in real.model.named_modules() if name.endswith((".k_proj", ".v_proj")) and "visual" not in name
    ]
    assert sizes.cached == sum(layer.out_features for layer in kept)
    assert plan_memory(Config(model=model), Ranks()).sizes == sizes


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v", "smolvlm"])
@pytest.mark.parametrize("max_pixels", [None, 256 * 256, 130 * 130])
def test_no_image_costs_more_than_the_planned_one(tmp_path_factory, family, max_pixels):
    """Of the sizes that are planned for. SmolVLM's processor scales even the smallest image to the longest edge."""
    folder = tmp_path_factory.getbasetemp() / "planned"
    settings = Model(path=f"tiny:{family}", device="cpu", max_image_pixels=max_pixels)
    planned = largest_image_of(settings, folder)
    model = load_model(settings, folder, 0)
    store = model.new_store()
    side = min(256, isqrt(max_pixels or 256**2))
    costs = []
    for size in [(side, side), (2 * side, side // 2), (40, 40), (side // 3, side)]:
        message = {"role": "user", "content": [{"type": "image", "image": noise(size, 0)}]}
        rendered = model.renderer.prompt([message])
        media = [store.load(image) for image in rendered.images]
        ids = expand(rendered.token_ids, model.policy.image_token_id, media)
        tokens = 1 + len(ids) - len(rendered.token_ids)
        inputs = merge_mm_inputs(media, model.family, model.image_processor, torch.device("cpu"))["pixel_values"]
        patches = inputs.numel() // model.family.vision_shape.pixels
        with torch.no_grad():
            (features,) = model.policy.encode_images(media)
        assert len(features.embeds) == patches // model.family.vision_shape.patches_per_token
        assert tokens <= planned.tokens and patches <= planned.patches
        costs.append((tokens, patches))
    unlimited = max_pixels is None and family != "smolvlm"  # for 512 x 512 pixels
    assert unlimited or max(costs)[0] > 0.75 * planned.tokens
    assert family != "smolvlm" or max(costs) == (planned.tokens, planned.patches)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 2}, "cluster.gpus must be set with cluster.nodes"),
        ({"gpus": 8, "nodes": 3}, "cluster.gpus must be a multiple of cluster.nodes (3), but it is 8"),
        ({"gpus": 2, "ranks": 4}, "cluster.ranks must be at most cluster.gpus (2), but it is 4"),
        ({"gpus": 4, "engines": 3, "colocate": True}, "cluster.engines must be a divisor of cluster.ranks (4)"),
        ({"gpus": 4, "ranks": 3, "engines": 2, "colocate": False}, "together at most cluster.gpus (4)"),
        ({"gpus": 1, "colocate": False}, "together at most cluster.gpus (1)"),
    ],
)
def test_what_cannot_be_placed_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(cluster=Cluster(**settings))
