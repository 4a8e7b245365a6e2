"""`Trainer.step` on simulated GPUs, at the true shapes of the recipes, against the memory plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from testing.gpu_sim import H100

from vlmrl.cli.plan import sizes_of
from vlmrl.cli.recipe import Recipe
from vlmrl.config import Config, Lora
from vlmrl.plan.advice import on_gpus
from vlmrl.plan.gpus import GIB, KNOWN
from vlmrl.plan.memory_plan import MemoryPlan

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEP = ROOT / "tests/testing/simulated_step.py"
ENDLESS = 400 * 2**30  # bytes of a GPU on which everything fits
RECIPES = ("geo3k", "zoom", "frozenlake", "search")


@pytest.fixture(scope="session")
def step(simulated_gpu):
    """``step(recipe, ranks, *options)``: what `simulated_step.py` measured."""

    @cache
    def run(recipe: str, ranks: int, *options: object, memory: int = ENDLESS) -> dict:
        done = simulated_gpu.run(STEP, f"recipes/{recipe}.py", ranks, *options, memory=memory, timeout=1800)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def recipe_config(name: str) -> Config:
    return Recipe.load(str(ROOT / f"recipes/{name}.py")).config()


def peak(measured: dict, phase: str, number: int = 1) -> float:
    return measured["steps"][number]["peaks"][phase]["total"]


def planned(config: Config, phase: str, ranks: int = 1) -> float:
    """The plan's bytes of the trainer's tensors, without rank 0's copy for the embedded engine."""
    config = on_gpus(config, ranks) if ranks > 1 else config
    parts = MemoryPlan.of(config, sizes_of(config), 1, KNOWN["h100-80gb"]).phases[phase]
    return sum(size for name, size in parts.items() if name not in ("reserve", "engine's weights"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_of_every_gpu_recipe_is_what_its_step_uses(step, recipe):
    measured, config = step(recipe, 1), recipe_config(recipe)
    used = max(peak(measured, "forward"), peak(measured, "backward"))
    assert planned(config, "forward and backward") == pytest.approx(used, rel=0.03)
    assert planned(config, "optimizer step") == pytest.approx(peak(measured, "optimizer"), rel=0.01)
    assert measured["largest"]["tokens"] == pytest.approx(config.train.tokens_per_micro_batch, rel=0.001)


def test_the_parts_of_a_step_are_those_of_the_plan(step):
    measured, config = step("geo3k", 1), recipe_config("geo3k")
    parts = MemoryPlan.of(config, sizes_of(config), 1, KNOWN["h100-80gb"]).phases["forward and backward"]
    backward = measured["steps"][1]["peaks"]["backward"]
    for name in ("weights", "masters", "gradients", "optimizer state"):
        assert parts[name] == pytest.approx(backward[name], rel=0.001), name
    working = sum(parts[name] for name in ("activations", "logits", "recomputed layer", "vision tower"))
    assert working == pytest.approx(backward["activations"], rel=0.06)


def test_the_defaults_of_a_2b_fit_an_h100_and_did_not_without_checkpointing(step):
    """The first step is without optimizer state, which arrives at its end: a run that fits one step may not fit two."""
    before = step("geo3k", 1, "--train.gradient-checkpointing", False)
    assert peak(before, "backward", 0) / GIB == pytest.approx(66.6, abs=0.5)
    assert peak(before, "backward", 1) / GIB == pytest.approx(82.5, abs=0.5)
    after = step("geo3k", 1, "--train.gradient-checkpointing", None, memory=H100)
    assert peak(after, "backward", 1) / GIB == pytest.approx(40.9, abs=0.5)
    assert peak(after, "optimizer", 1) / GIB == pytest.approx(35.7, abs=0.3)  # the fused optimizer makes no copies
    with pytest.raises(AssertionError, match="CUDA out of memory"):
        step("geo3k", 1, "--train.gradient-checkpointing", False, memory=H100)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_plan_of_lora(step, checkpointed):
    measured = step("geo3k", 1, "--model.lora.rank", 32, "--train.gradient-checkpointing", checkpointed)
    config = recipe_config("geo3k")
    train = replace(config.train, gradient_checkpointing=checkpointed)
    config = replace(config, model=replace(config.model, lora=Lora(rank=32)), train=train)
    used = max(peak(measured, "forward"), peak(measured, "backward"))
    assert planned(config, "forward and backward") == pytest.approx(used, rel=0.05)


@pytest.mark.parametrize(("model", "ranks"), [("Qwen/Qwen3-VL-2B-Instruct", 8), ("Qwen/Qwen3-VL-30B-A3B-Instruct", 16)])
def test_the_plan_of_a_sharded_trainer(step, model, ranks):
    """Rank 0 of FSDP2, with the policy's own sharding; collectives return at once, and its memory is counted by torch's allocator."""
    measured = step("geo3k", ranks, "--model.path", model)
    config = recipe_config("geo3k")
    config = replace(config, model=replace(config.model, path=model))
    used = max(peak(measured, "forward"), peak(measured, "backward"))
    assert planned(config, "forward and backward", ranks) == pytest.approx(used, rel=0.05)
    assert planned(config, "optimizer step", ranks) == pytest.approx(peak(measured, "optimizer"), rel=0.03)


def test_other_families_fit_the_plan_within_ten_percent(step):
    model = "Qwen/Qwen2.5-VL-3B-Instruct"
    measured = step("geo3k", 1, "--model.path", model)
    config = recipe_config("geo3k")
    config = replace(config, model=replace(config.model, path=model))
    used = max(peak(measured, "forward"), peak(measured, "backward"))
    assert planned(config, "forward and backward") == pytest.approx(used, rel=0.1)


KNOWN_NUMBERS = """
import torch
from testing.known_numbers import KnownNumbers

ids = torch.tensor([[5, 9, 9, 7]])
with KnownNumbers():
    there = ids.to("cuda")
    mask = there == 9
    assert mask.nonzero().shape == (2, 2) and int(mask.sum()) == 2
    hidden = torch.empty(1, 4, 8, device="cuda")
    assert hidden[mask].shape == (2, 8)
    hidden[mask] = torch.empty(2, 8, device="cuda")
    assert there[0, mask[0]].tolist() == [9, 9]
    assert torch.tensor([3, 4], device="cuda").cpu().tolist() == [3, 4]
    assert float(hidden.sum()) == 1.0 and not bool(hidden.isinf().any())  # not known
    there[0, 0] = 1
    assert there.tolist() == [[1, 9, 9, 7]]
"""


def test_numbers_that_follow_from_the_host_are_known(simulated_gpu):
    simulated_gpu.run(KNOWN_NUMBERS)


PLAN = """
from vlmrl.config import Config, Model
from vlmrl.plan.memory_plan import plan_memory
from vlmrl.train.ranks import Ranks

print(plan_memory(Config(output_dir=OUTPUT, model=Model(path="tiny:qwen3_vl")), Ranks()))
"""


def test_a_run_prints_the_plan_of_the_gpu_at_hand(simulated_gpu, tmp_path):
    printed = simulated_gpu.run(f"OUTPUT = {str(tmp_path)!r}\n{PLAN}").stdout
    assert "memory    of NVIDIA H100" in printed and "79.2 GiB" in printed
    assert "forward and backward: " in printed and "bfloat16" in printed
