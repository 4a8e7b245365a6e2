"""Logprobs that are not finite are refused after the mini-batch, with their trajectory and token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from testing.trees import random_rows

from vlmrl.algos import LossInputs
from vlmrl.config import Algo, Model, Optim
from vlmrl.model.loading import load_model
from vlmrl.train.finite_check import NAMES, FiniteCheck
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample


def row(name: str, tokens: int) -> Sample:
    lists = ([1], [2] * tokens, [1] * tokens, [-1.0] * tokens, [0] * tokens)
    return Sample(*lists, "g", name, is_last_step=True, stop_reason="stop")


def inputs(mask: torch.Tensor, **given: torch.Tensor) -> LossInputs:
    good = torch.full(mask.shape, -1.0)
    fields = dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs", "advantages"), good)
    return LossInputs(**fields | given, loss_mask=mask)


@pytest.mark.parametrize("wrong", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_wrong_logprob_is_named_unless_it_is_masked(name, wrong):
    rows, bad = [row("a", 3), row("b", 3)], torch.full((2, 3), -1.0)
    bad[1, 2] = wrong
    masked = inputs(torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), **{name: bad})
    check = FiniteCheck()
    check.add([row("c", 2)], inputs(torch.ones(1, 2)))
    check.add(rows, masked)
    assert check.error() is None
    check.add(rows, inputs(torch.ones(2, 3), **{name: bad}))
    assert check.error() == f"trajectory b, response token 2: {name} must be finite, but it is {wrong}."


@pytest.mark.parametrize("corrections", [(), ("token_truncation", "veto")])
def test_a_step_with_one_leaves_the_weights_alone(tmp_path, corrections):
    model = load_model(Model(path="tiny:qwen3_vl", device="cpu", dtype="float32"), tmp_path, seed=0)
    rows = [replace(each, advantage=1.0) for each in random_rows(model, 0)]
    assert rows[1].rollout_logprobs is not None
    place = rows[1].loss_mask.index(1)
    wrong = [math.nan if at == place else value for at, value in enumerate(rows[1].rollout_logprobs)]
    rows[1] = replace(rows[1], rollout_logprobs=wrong)
    before = {name: weight.clone() for name, weight in model.policy.named_parameters()}
    spec = TrainerSpec(Algo(corrections=corrections), Optim(), total_steps=1, tokens_per_micro_batch=60)
    message = (
        f"trajectory {rows[1].trajectory_id}, response token {place}: rollout_logprobs must be finite, but it is nan"
    )
    with pytest.raises(ValueError, match=message):
        Trainer(model.policy, spec).step(rows)
    assert all(torch.equal(weight, before[name]) for name, weight in model.policy.named_parameters())
    assert all(weight.grad is None for weight in model.policy.parameters())


def test_a_gradient_that_is_not_finite_is_not_added_to_the_next(tmp_path):
    model = load_model(Model(path="tiny:qwen3_vl", device="cpu", dtype="float32"), tmp_path, seed=0)
    rows = [replace(each, advantage=1.0) for each in random_rows(model, 0)]
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=60))
    weight = next(weight for weight in model.policy.parameters() if weight.requires_grad)
    hook = weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(FloatingPointError, match="the gradient norm is nan, so the weights were not updated"):
        trainer.step(rows)
    hook.remove()
    assert all(weight.grad is None for weight in model.policy.parameters())


class AnotherRankFoundOne(Ranks):
    """One of several ranks, of which another has found a logprob that is not finite."""

    def max(self, tensor):
        return torch.ones_like(tensor)


def test_every_rank_refuses_the_step_that_one_refuses(tmp_path):
    """Or the others would wait for that one in their next collective."""
    model = load_model(Model(path="tiny:qwen3", device="cpu", dtype="float32"), tmp_path, seed=0)
    rows = [replace(row(name, 3), group_id=name, advantage=1.0) for name in "ab"]
    spec = TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=60)
    with pytest.raises(ValueError, match="another rank found a logprob that is not finite"):
        Trainer(model.policy, spec, ranks=AnotherRankFoundOne()).step(rows)
    assert all(weight.grad is None for weight in model.policy.parameters())
