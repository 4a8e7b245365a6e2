"""Compiled decoder layers give the logprobs and gradients of eager ones, with few graphs, under the same names."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from testing.trees import Watched, largest_difference, random_rows, train
from torch._dynamo.utils import counters

from vlmrl.config import Lora, Model
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import LoadedModel, load_model
from vlmrl.model.own_forward import use_forward

DIFFERENT = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "smolvlm"]
"""A family of each kind of decoder layer."""

BACKENDS = {"qwen3_vl": "inductor", "qwen3_5": "aot_eager"}
"""Of the first, kernels are made, too, and of the second, graphs of the gradients: both take most of a test's time. Of the others, the
forward graphs are traced and run as they are."""

GRAPHS = {"qwen3_vl_moe": 7, "qwen3_5": 6, "smolvlm": 6}
"""Two before the attention, and two after it; more around a router, in recurrent layers, and where images make the input a view."""


def load(path: str, folder, **settings) -> LoadedModel:
    return load_model(Model(path=f"tiny:{path}", device="cpu", dtype="float32", **settings), folder, seed=0)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def apart(one: Watched, other: Watched) -> float:
    """Between the two's whole gradients, relative to their norm."""
    assert one.gradient.keys() == other.gradient.keys()
    ours, theirs = (torch.cat([g.flatten() for g in each.gradient.values()]) for each in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


def check(model: LoadedModel, most: int) -> None:
    """Rows as trees, with checkpointed activations, twice: for the second trees nothing is compiled."""
    model.policy.enable_gradient_checkpointing()
    all_rows = [random_rows(model, seed, groups=1) for seed in (0, 1)]
    eager = [train(model, rows, 10**6, share=True) for rows in all_rows]
    names = list(model.policy.state_dict())
    torch.compiler.reset()
    before = graphs()
    model.policy.compile_layers()
    for rows, theirs in zip(all_rows, eager, strict=True):
        ours = train(model, rows, 10**6, share=True)
        assert 0 < graphs() - before <= most
        assert largest_difference(ours, theirs) < 2e-6  # of logprobs around -5, whose last digit is 5e-7
        assert apart(ours, theirs) < 1e-6
    assert list(model.policy.state_dict()) == names


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", DIFFERENT)
def test_compiled_layers_give_the_eager_numbers(family, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=BACKENDS.get(family, "eager")))
    check(load(family, tmp_path), most=GRAPHS.get(family, 4))


@pytest.mark.slow
@pytest.mark.long
def test_they_do_with_adapters(tmp_path, monkeypatch):
    """The first layer's inputs have no gradient: it has graphs of its own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    check(load("qwen3", tmp_path, lora=Lora(rank=4)), most=8)


def test_the_engine_samples_with_uncompiled_layers(tmp_path):
    model = load("qwen3_vl", tmp_path)
    request = Request("t", [5, 6, 7], [], SamplingParams(max_tokens=8, seed=1))

    def sampled():
        engine = HFEngine(model.policy, model.renderer)
        completion = asyncio.run(engine.generate(request))
        engine.close()
        return completion

    eager, before = sampled(), graphs()
    model.policy.compile_layers()
    again = sampled()
    assert again.token_ids == eager.token_ids and again.logprobs == eager.logprobs
    assert graphs() == before


class Doubled(torch.nn.Module):
    def forward(self, number):
        return 2 * number


def test_modules_get_a_forward_of_ours_once():
    def plus_one(forward):
        return lambda module, number: forward(module, number) + 1

    def plus_ten(forward):
        return lambda module, number: forward(module, number) + 10

    first, second, plain = Doubled(), Doubled(), Doubled()
    use_forward([first, second], plus_one)
    use_forward([first], plus_one)
    assert (first(3), second(3), plain(3)) == (7, 7, 6)
    assert type(first) is type(second) is not Doubled and isinstance(first, Doubled)
    assert type(first).__name__ == "Doubled" and type(first).__module__ == Doubled.__module__
    use_forward([first], plus_ten)
    assert (first(3), second(3)) == (16, 7)
