"""Memory by part and phase against sums by hand, and the advice for runs that do not fit."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import huggingface_hub
import pytest
import torch

from vlmrl.cli.plan import plan_lines, sizes_of
from vlmrl.config import Cluster, Config, Lora, Model, Optim, Rollout, ServerSettings, Train
from vlmrl.engine.hf.budget import PREFILL_TOKENS, reserved_bytes
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.families.base import LargestImage, VisionShape
from vlmrl.plan import advice, gpus, memory_plan
from vlmrl.plan.activations import Gradients, MicroBatchSize, ModelShape, micro_batch_memory
from vlmrl.plan.advice import Change, changes_of, on_gpus, suggestions
from vlmrl.plan.gpus import GIB, KNOWN, Gpu, gpu_named
from vlmrl.plan.memory_plan import MemoryPlan, Sizes, placement_of, server_memory_fraction
from vlmrl.plan.phases import (
    CONTEXT,
    NCCL,
    GpuSharing,
    image_features,
    micro_batch_size,
    phases_of,
)
from vlmrl.plan.published_models import PUBLISHED, shape_folder
from vlmrl.train.master_weights import STATE_BYTES

MODEL = "Qwen/Qwen3-VL-2B-Instruct"
H100 = KNOWN["h100-80gb"]
SHAPE = ModelShape(
    layers=2,
    hidden=8,
    heads=2,
    queries=8,
    keys=4,
    intermediate=16,
    vocabulary=100,
    qk_norm=True,
    largest_layer=50,
    outside_layers=20,
)
GEO3K = Config(
    model=Model(path=MODEL, max_image_pixels=512 * 512),
    rollout=Rollout(group_size=8, max_turns=3, max_tokens=5120, max_response_tokens=2048),
    train=Train(groups_per_batch=64),
)
TOWER = VisionShape(24, 1024, 4096, 1536, 4, 4)
IMAGE = LargestImage((512, 512), 256, 1024)
SERVED = replace(GEO3K, engine="sglang")


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    return sizes_of(GEO3K)


def test_what_a_layer_keeps():
    """Norms 2 x 4 x 8, queries and keys (4 + 2) x 12, log-sum-exp 4 x 2, MLP 8 x 16."""
    assert SHAPE.layer_bytes(adapted=False) == SHAPE.layer_bytes(adapted=True) == 64 + 72 + 8 + 128
    other = replace(SHAPE, fused_norms=False)  # 2 x 8 x 8, and (4 + 6) x 12
    assert other.layer_bytes(adapted=False) == 128 + 120 + 8 + 128
    assert other.layer_bytes(adapted=True) == 96 + 96 + 8 + 128  # no gradients of norms
    experts = replace(SHAPE, experts_per_token=2)
    assert experts.mlp_bytes == 2 * (8 * 16 + 6 * 8)


def test_a_micro_batch_with_and_without_checkpointing():
    size = MicroBatchSize(tokens=10, targets=4)
    kept = micro_batch_memory(SHAPE, size, Gradients(checkpointed=False))
    outside = (6 * 10 + 2 * 4) * 8
    head = 10 * 4 * 100 + 4 * 8 * 100  # of the 4 targets: logits and their gradient, and the head's in float32
    assert kept == {"activations": 10 * 2 * 272 + outside, "logits": head, "recomputed layer": 0, "vision tower": 0}
    recomputed = micro_batch_memory(SHAPE, size, Gradients(checkpointed=True))
    assert recomputed["activations"] == 10 * 2 * 16 + outside
    small_vocabulary = replace(SHAPE, vocabulary=5)
    layer = micro_batch_memory(small_vocabulary, size, Gradients(checkpointed=True))
    assert (layer["logits"], layer["recomputed layer"]) == (0, 10 * (272 + 2 * 8 + 8 * 16 / 4))


def test_images_of_a_trained_and_of_a_frozen_tower():
    vision = VisionShape(depth=3, hidden=4, intermediate=8, pixels=6, outputs=2, patches_per_token=4)
    shape, size = replace(SHAPE, vision=vision), MicroBatchSize(tokens=10, targets=4, patches=8)
    trained = micro_batch_memory(shape, size, Gradients(checkpointed=True))["vision tower"]
    assert trained == 8 * (6 * 6 + 3 * 2 * 4 + 2 * (8 * 4 + 2 * 8 / 4))
    frozen = micro_batch_memory(shape, size, Gradients(checkpointed=True, vision=False))["vision tower"]
    assert frozen == 8 * (4 * 6 + 2 * 2 * 8 / 4)


def test_the_largest_micro_batch_is_full_of_the_longest_trajectories():
    size = micro_batch_size(GEO3K, replace(SHAPE, vision=TOWER, image=IMAGE))
    # a prompt of 1280 tokens, 4 rows of up to 3840; an image in the prompt and two in each row, of 256 tokens and 1024 patches
    assert size == MicroBatchSize(16384, 16384 - 1280 - 4 * 2 * 256, 9 * 1024)
    assert micro_batch_size(GEO3K, SHAPE) == MicroBatchSize(16384, 16384 - 1280)


def test_an_image_with_separators_has_fewer_features_than_tokens():
    shape = replace(SHAPE, vision=TOWER, image=LargestImage((256, 256), 300, 1024))
    assert micro_batch_size(GEO3K, shape) == MicroBatchSize(16384, 16384 - 1280 - 4 * 2 * 300, 9 * 1024)
    assert image_features(GEO3K, shape, 1) == (64 + 512 * 2) * 256 * 4 * 8 * 2


TRAINER = {"weights": 200.0, "masters": 400.0, "gradients": 400.0, "optimizer state": 800.0}
ENGINE = {"weights": 200.0, "KV cache": 300.0}


def placed(**settings) -> GpuSharing:
    usual = {"ranks": 1, "engine": True, "served": True, "together": True, "offloads": True, "copies": True}
    return GpuSharing(**usual | settings)


def phases(placement: GpuSharing, config: Config = SERVED, engine: dict = ENGINE, trainer: dict = TRAINER) -> dict:
    return phases_of(config, SHAPE, trainer, engine, 100, placement, torch.bfloat16, 79 * GIB)


def test_a_server_and_an_offloaded_trainer_on_one_gpu():
    found = phases(placed())
    assert found["rollout"] == {
        "server's weights": 200,
        "server's KV cache": 300,
        "server's activations and graphs": SGLangBackend.runtime_memory(79 * GIB) + CONTEXT,
        "reserve": CONTEXT,
    }
    training = found["forward and backward"]
    assert {part for part in training if "server" in part} == {"server's context"}  # it sleeps
    assert training["optimizer state"] == 800
    update = found["weight update"]  # `TrainerMemory.onload` moves all of the trainer
    assert (update["weights"], update["masters"], update["optimizer state"]) == (200, 400, 800)
    assert found["weight update"]["buckets"] == GIB and found["weight update"]["server's weights"] == 200
    assert phases(placed(ranks=2))["weight update"]["buckets"] == 1.5 * GIB  # the gathered weights, too
    vllm = phases(placed(), replace(SERVED, engine="vllm"))["forward and backward"]
    assert vllm["server's weights"] == 200 and "server's KV cache" not in vllm
    adapted = phases(placed(), replace(SERVED, model=replace(SERVED.model, lora=Lora(rank=8))))["forward and backward"]
    assert adapted["server's weights"] == 200


def test_an_offloaded_optimizer_brings_its_state_back_in_parts():
    offloaded = replace(SERVED, optim=Optim(offload=True))
    found = phases_of(offloaded, SHAPE, TRAINER, ENGINE, 10**9, placed(ranks=2), torch.bfloat16, 79 * GIB)
    assert found["optimizer step"]["optimizer state"] == STATE_BYTES
    found = phases_of(offloaded, SHAPE, TRAINER, ENGINE, 100, placed(), torch.bfloat16, 79 * GIB)
    assert found["optimizer step"]["optimizer state"] == 800


def test_an_embedded_engine_shares_the_trainers_weights_and_gpu():
    found = phases(placed(served=False, offloads=False, copies=False), engine={"KV cache": 300.0})
    assert set(found) == {"rollout", "forward and backward", "optimizer step"}
    assert found["rollout"]["trainer's optimizer state"] == 800 and "trainer's gradients" not in found["rollout"]
    assert not any("engine" in part for part in found["forward and backward"])


def test_engines_with_gpus_of_their_own_do_not_meet_the_trainer():
    found = phases(placed(together=False, offloads=False))
    assert not any("trainer" in part for part in found["rollout"])
    assert not any("server" in part for part in found["forward and backward"])


def test_an_embedded_engine_keeps_image_features_during_the_rollout_alone():
    """64 prompts, and two later images of each of 512 trajectories: 256 tokens, and 4 outputs of 8 bfloat16 numbers."""
    shape = replace(SHAPE, vision=TOWER, image=IMAGE)
    assert image_features(GEO3K, shape, 1) == (64 + 512 * 2) * 256 * 4 * 8 * 2
    assert image_features(GEO3K, shape, 8) == image_features(GEO3K, shape, 1) / 8
    assert image_features(replace(GEO3K, engine="sglang"), shape, 1) == image_features(GEO3K, SHAPE, 1) == 0
    placement = placed(served=False, offloads=False, copies=False)
    found = phases_of(GEO3K, SHAPE, TRAINER, {"KV cache": 300.0}, 100, placement, torch.bfloat16, 79 * GIB, 5.0)
    assert {name: parts.get("image features") for name, parts in found.items()} == {
        "rollout": 5.0,
        "forward and backward": None,
        "optimizer step": None,
    }


def test_several_ranks_gather_layers_and_need_nccl():
    training = phases(placed(ranks=4))["forward and backward"]
    assert training["gathered layers"] == 2 * (20 + 2 * 50) + 6 * 50
    assert training["reserve"] >= CONTEXT + NCCL


def test_an_offloaded_optimizer_state_is_on_the_gpu_for_the_optimizer_step_alone():
    trainer = {name: size for name, size in TRAINER.items() if name != "optimizer state"}
    found = phases(placed(), replace(SERVED, optim=Optim(offload=True)), trainer=trainer)
    assert "optimizer state" not in found["forward and backward"]
    assert found["optimizer step"]["optimizer state"] == 800


def test_a_colocated_server_gets_what_computing_leaves_and_no_more_than_it_needs(sizes):
    sglang = replace(GEO3K, engine="sglang")
    most = 1 - (SGLangBackend.runtime_memory(H100.memory) + 2 * CONTEXT) / H100.memory
    assert server_memory_fraction(sglang, sizes, H100.memory) == pytest.approx(most)
    few = replace(sglang, rollout=replace(GEO3K.rollout, max_concurrent=8))
    cache = 8 * 5120 * sizes.cached * 2
    assert server_memory_fraction(few, sizes, H100.memory) == pytest.approx(
        (1.02 * cache + 2 * sizes.parameters) / H100.memory
    )
    with pytest.raises(ValueError, match=re.escape("the weights alone are 4.0 GiB: set server.tp to divide them")):
        server_memory_fraction(sglang, sizes, 8 * GIB)
    divided = replace(sglang, server=ServerSettings(tp=2), cluster=Cluster(gpus=2))
    assert server_memory_fraction(divided, sizes, 24 * GIB) < 1


def test_the_share_of_the_server_fits_beside_the_trainer_at_every_moment(sizes):
    plan = MemoryPlan.of(replace(GEO3K, engine="sglang"), sizes, 1, H100)
    assert plan.fits and plan.peak <= H100.memory
    assert plan.cache + 2 * sizes.parameters == pytest.approx(
        server_memory_fraction(replace(GEO3K, engine="sglang"), sizes, H100.memory) * H100.memory
    )


def test_the_embedded_engine_leaves_free_what_its_budget_leaves_free(sizes):
    """With less the plan would promise a KV cache that the engine does not use."""
    plan = MemoryPlan.of(GEO3K, sizes, 1, H100)
    rows = plan.cache / (5120 * sizes.cached * 2)
    assert 1 < rows < 256
    reserved = reserved_bytes(2048, 151936, 2, rows, PREFILL_TOKENS)
    assert plan.phases["rollout"]["engine's activations"] == pytest.approx(reserved)
    assert plan.peak == pytest.approx(H100.memory)
    limited = replace(GEO3K, rollout=replace(GEO3K.rollout, kv_cache_gib=2.0))
    assert MemoryPlan.of(limited, sizes, 1, H100).cache == 2 * GIB


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_an_engine_that_samples_during_training_keeps_its_memory(sizes, engine):
    config = replace(GEO3K, engine=engine, train=replace(GEO3K.train, max_staleness=1))
    plan = MemoryPlan.of(config, sizes, 1, H100)
    training = plan.phases["forward and backward"]
    assert sum(size for part, size in training.items() if "KV cache" in part) == plan.cache > 5 * GIB
    assert any(part.startswith("trainer's optimizer state") for part in plan.phases["rollout"])
    assert plan.fits and plan.training_peak == pytest.approx(H100.memory, rel=0.03)
    assert not MemoryPlan.of(config, sizes, 1, KNOWN["l40s-48gb"]).fits
    synchronous = MemoryPlan.of(replace(config, train=GEO3K.train), sizes, 1, H100)
    assert synchronous.cache > plan.cache + 10 * GIB


def test_the_plan_names_the_memory_that_a_server_beside_a_working_trainer_must_be_given():
    config = replace(GEO3K, engine="sglang", train=replace(GEO3K.train, max_staleness=1))
    (line,) = (line for line in plan_lines(config, "h100-80gb", None) if line.startswith("set "))
    share = float(line.partition("mem-fraction-static ")[2].partition(",")[0])
    parts = MemoryPlan.of(config, sizes_of(config), 1, H100).phases["rollout"]
    assert 0 <= (parts["server's weights"] + parts["server's KV cache"]) / H100.memory - share < 0.01
    given = replace(config, server=ServerSettings(args={"mem_fraction_static": share}))
    for settled in (given, replace(config, train=GEO3K.train), GEO3K):
        assert not any(line.startswith("set ") for line in plan_lines(settled, "h100-80gb", None))


def test_each_suggestion_makes_the_run_fit():
    gpu = gpu_named("h100-80gb")
    config = replace(GEO3K, train=replace(GEO3K.train, gradient_checkpointing=False))
    lines = suggestions(config, gpu, sizes_of)
    assert lines[0].startswith("--train.gradient-checkpointing True: ")
    assert not MemoryPlan.of(config, sizes_of(config), 1, gpu).fits
    small = suggestions(GEO3K, gpu_named("4090-24gb"), sizes_of)
    assert [line.split(":")[0] for line in small][:2] == ["--model.lora.rank 32", "--cluster.gpus 4"]
    adapted = replace(GEO3K, model=replace(GEO3K.model, lora=Lora(rank=32)))
    assert MemoryPlan.of(adapted, sizes_of(adapted), 1, gpu_named("4090-24gb")).fits


def test_suggestions_are_joined_where_none_is_enough_alone_and_each_is_needed(monkeypatch):
    """Frozen images are tried before the optimizer's offload, and not needed with it."""
    smaller, frozen = Change.of("train.tokens_per_micro_batch", 8192), Change.of("model.freeze", ("vision_tower",))
    with monkeypatch.context() as patched:
        changes = [smaller, frozen, Change("--optim.offload", {"optim.offload": True})]
        patched.setattr(advice, "changes_of", lambda config, experts: iter(changes))
        (line,) = suggestions(replace(GEO3K, engine="sglang"), Gpu("27.2 GiB", 27.2 * GIB), sizes_of)
    assert line.startswith("--train.tokens-per-micro-batch 8192 --optim.offload, together: 26.9 GiB")
    assert suggestions(GEO3K, Gpu("6 GiB", 6 * GIB), sizes_of) == []


def test_what_releasing_weights_and_the_optimizers_parts_make_fit():
    """Full training on H100s with SGLang at tp 1: an 8B on two, and a 30B-A3B on eight, with less to spare than is assumed."""
    plans = {}
    for size, count in (("8B", 2), ("30B-A3B", 8)):
        model = replace(GEO3K.model, path=f"Qwen/Qwen3-VL-{size}-Instruct")
        config = on_gpus(replace(GEO3K, model=model, engine="sglang", optim=Optim(offload=True)), count)
        plans[size] = MemoryPlan.of(config, sizes_of(config), 1, H100)
    assert plans["8B"].fits and not plans["8B"].is_tight
    assert plans["8B"].training_peak / GIB == pytest.approx(50.8, abs=0.1)
    assert plans["30B-A3B"].fits and plans["30B-A3B"].is_tight
    assert plans["30B-A3B"].training_peak / GIB == pytest.approx(77.0, abs=0.1)  # the weight update


def test_servers_on_another_gpu_are_no_reason_to_offload():
    config = replace(GEO3K, engine="sglang", server=ServerSettings(first_gpu=1))
    assert not placement_of(config, 1, copies=True).offloads
    assert placement_of(replace(GEO3K, engine="sglang"), 1, copies=True).offloads


def test_a_kv_cache_that_is_too_large_is_the_first_suggestion():
    config = replace(GEO3K, rollout=replace(GEO3K.rollout, kv_cache_gib=70.0))
    first, *_ = suggestions(config, H100, sizes_of)
    assert first.startswith("--rollout.kv-cache-gib None: ")


def test_suggested_gpus_come_with_their_machines_and_replace_other_numbers_of_the_recipe():
    options = [change.option for change in changes_of(GEO3K, experts=False)]
    assert "--cluster.gpus 8" in options and "--cluster.gpus 16 --cluster.nodes 2" in options
    divided = replace(GEO3K, cluster=Cluster(gpus=4, ranks=2, engines=1), engine="sglang")
    options = [change.option for change in changes_of(divided, experts=False)]
    assert "--cluster.gpus 8 --cluster.ranks None --cluster.engines None" in options


def test_the_plan_names_gpu_mode_and_what_was_assumed():
    lines = "\n".join(plan_lines(replace(GEO3K, engine="sglang"), "h100-80gb", 8))
    assert "8 trainer ranks (FSDP2) and 8 SGLang servers on 8 GPUs of 1 node, colocated" in lines
    assert "planned on Ray, as with --cluster.gpus 8" in lines and "not for torchrun" in lines
    assert "trajectories of 5120 tokens" in lines and "an image of 512 x 512 pixels" in lines
    assert "verdict   fits h100-80gb. Computed, not measured" in lines
    sixteen = "\n".join(plan_lines(GEO3K, "h100-80gb", 16))
    assert "16 GPUs of 2 nodes" in sixteen
    with pytest.raises(ValueError, match=re.escape("--gpu must be one of l4-24gb, a10-24gb, 4090-24gb")):
        plan_lines(GEO3K, "h100", None)
    with pytest.raises(ValueError, match="--gpus must be 1 or more, but it is 0"):
        plan_lines(GEO3K, "h100-80gb", 0)


@pytest.mark.parametrize("at_hand", [None, H100])
def test_without_a_gpu_the_plan_is_for_the_cpu(monkeypatch, at_hand):
    """As for a run on the CPU of a machine that has a GPU."""
    for module in (memory_plan, gpus):
        monkeypatch.setattr(module, "gpu_at_hand", lambda: at_hand)
    lines = plan_lines(Config(model=Model(path=MODEL, device="cpu")), None, None)
    assert any("placement one process, on cpu" in line for line in lines)
    assert "plans for a GPU that is not at hand" in lines[-1]


def test_an_unknown_model_is_asked_for_once(monkeypatch):
    """transformers would repeat the request five times, for 23 s."""
    asked, http = [], sys.modules[type(huggingface_hub.get_session()).__module__.partition(".")[0]]  # httpx or httpx2

    def unreachable(url, **settings):
        asked.append(url)
        raise http.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    with pytest.raises(
        ValueError,
        match=r"model.path must be a folder with the model's config.json.*Qwen/Qwen3-VL-2B-I.*does not give its config.json",
    ):
        sizes_of(Config(model=Model(path="Qwen/Unpublished-VL-1B")))
    assert asked == ["https://huggingface.co/Qwen/Unpublished-VL-1B/resolve/main/config.json"]


def test_published_shapes_have_the_published_numbers_of_parameters():
    """As the model pages on the Hugging Face Hub give them, tied heads counted once."""
    counts = {name: sizes_of(Config(model=Model(path=name))).parameters for name in PUBLISHED}
    assert counts["Qwen/Qwen3-VL-2B-Instruct"] == 2_127_532_032
    assert counts["Qwen/Qwen3-VL-4B-Instruct"] == 4_437_815_808
    assert counts["Qwen/Qwen3-VL-8B-Instruct"] == 8_767_123_696
    assert counts["Qwen/Qwen3-VL-30B-A3B-Instruct"] == 31_070_754_032
    assert counts["Qwen/Qwen3-VL-32B-Instruct"] == 33_357_390_064
    assert counts["Qwen/Qwen2.5-VL-3B-Instruct"] == 3_754_622_976
    assert counts["Qwen/Qwen2.5-VL-7B-Instruct"] == 8_292_166_656
    assert counts["Qwen/Qwen3-1.7B"] == 1_720_574_976


def test_a_folder_of_ones_own_is_not_replaced(tmp_path):
    with shape_folder(str(tmp_path)) as folder:
        assert folder == str(tmp_path)
    with shape_folder("Qwen/Qwen3-VL-2B-Thinking") as folder:
        assert folder != "Qwen/Qwen3-VL-2B-Thinking"
