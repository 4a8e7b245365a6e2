"""Every loss, KL and correction with numbers worked out by hand, and gradients against finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from vlmrl.algos import CORRECTIONS, KL, LOSSES, LossInputs
from vlmrl.algos.corrections import mismatch

LOG2 = math.log(2)


def inputs(log_ratios, advantages, mask=None, old=-1.0) -> LossInputs:
    """One row whose ratios to the old policy are the exponentials of ``log_ratios``."""
    old_logprobs = torch.full((1, len(log_ratios)), old, dtype=torch.float64)
    logprobs = old_logprobs + torch.tensor([log_ratios], dtype=torch.float64)
    mask = [1.0] * len(log_ratios) if mask is None else mask
    tensors = (torch.tensor([values], dtype=torch.float64) for values in (advantages, mask))
    advantage, loss_mask = tensors
    return LossInputs(logprobs, old_logprobs, old_logprobs, advantage, loss_mask)


def loss(name, *args, **options):
    return LOSSES[name](inputs(*args), **options).per_token[0].tolist()


def test_ppo_takes_the_worse_of_plain_and_clipped():
    # ratios 2 and 1/2; A = 1: min(2, 1.28), min(.5, .8); A = -1: -min(-2, -1.28) = 2, -min(-.5, -.8) = .8
    assert loss("ppo", [LOG2, -LOG2], [1, 1]) == pytest.approx([-1.28, -0.5])
    assert loss("ppo", [LOG2, -LOG2], [-1, -1]) == pytest.approx([2.0, 0.8])


def test_dual_clip_bounds_what_a_huge_ratio_costs():
    assert loss("dual_clip", [math.log(10), math.log(10)], [-1, 1], c=3.0) == pytest.approx([3.0, -1.28])


def test_gspo_has_one_ratio_a_row_over_its_trained_tokens():
    # masked tokens do not count: mean log-ratio of the first two is (log 2 - 0) / 2
    row = ([LOG2, 0.0, 9.0], [1, 1, 1], [1, 1, 0])
    assert loss("gspo", *row, clip_low=0.9, clip_high=0.9)[:2] == pytest.approx([-math.sqrt(2)] * 2)
    assert loss("gspo", *row)[:2] == pytest.approx([-1.0004] * 2)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # -clip(10, 0, 5) * A * logprob, the logprob being -1 + log 10
    assert loss("cispo", [math.log(10)], [2]) == pytest.approx([-5 * 2 * (-1 + math.log(10))])


def test_sapo_is_a_soft_gate():
    # at ratio 1: sigmoid(0) * 4 / tau = 2 / tau
    assert loss("sapo", [0.0, 0.0], [1, -1]) == pytest.approx([-2.0, 2 / 1.05])


def test_dppo_stops_where_the_probability_has_moved_far_in_the_wanted_direction():
    # old probability e^-1 = .368; ratio 2 gives .736: moved by .368 > .15
    far, near = LOG2, math.log(1.1)
    assert loss("dppo_tv", [far, far, near], [1, -1, 1]) == pytest.approx(
        [0.0, 2 * (-1 + LOG2), -1.1 * (-1 + math.log(1.1))]
    )
    assert loss("dppo_kl", [far, far], [1, -1])[0] == 0.0
    assert loss("dppo_kl", [near], [1]) == pytest.approx([-1.1 * (-1 + math.log(1.1))])


def test_reinforce_and_sft():
    assert loss("reinforce", [0.5], [2]) == pytest.approx([1.0])  # -2 * -.5
    assert loss("sft", [0.5], [2]) == pytest.approx([0.5])


@pytest.mark.parametrize("name", LOSSES)
def test_a_log_ratio_of_50_stays_finite(name):
    assert all(math.isfinite(value) for value in loss(name, [50.0, -50.0], [1, -1]))


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_change_nothing_for_the_others(name):
    some = loss(name, [0.1, 0.2, 0.3], [1, -1, 1], [1, 1, 0])
    assert some[:2] == pytest.approx(loss(name, [0.1, 0.2, -7.0], [1, -1, 5], [1, 1, 0])[:2])
    assert all(map(math.isfinite, loss(name, [0.1, 0.2], [1, 1], [0, 0])))


def test_an_infinite_logprob_is_refused_where_it_counts():
    with pytest.raises(ValueError, match=r"logprobs\[0, 1\] must be finite, but it is -inf"):
        inputs([0.0, -math.inf], [1, 1])
    inputs([0.0, -math.inf], [1, 1], [1, 0])


# The coefficient of -A grad logprob that each formula means at a ratio r, away from its kinks.
COEFFICIENT = {
    "ppo": lambda r: r,
    "dual_clip": lambda r: r,
    "gspo": lambda r: r,
    "cispo": lambda r: r,
    "sapo": lambda r: 4 * math.exp(r - 1) / (1 + math.exp(r - 1)) ** 2 * r,  # sigmoid' * 4 / tau * tau * r, tau 1
    "dppo_tv": lambda r: r,
    "dppo_kl": lambda r: r,
    "reinforce": lambda r: 1.0,
}


@pytest.mark.parametrize("name", COEFFICIENT)
def test_the_gradient_is_what_the_formula_means(name):
    given = inputs([math.log(1.1)], [0.7])
    logprobs = given.logprobs.clone().requires_grad_()
    options = {"clip_low": 0.5, "clip_high": 0.5} if name == "gspo" else {}
    LOSSES[name](replace(given, logprobs=logprobs), **options).per_token.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-0.7 * COEFFICIENT[name](1.1))


@pytest.mark.parametrize("name", ["ppo", "dual_clip", "sapo", "reinforce", "sft"])
def test_autograd_agrees_with_finite_differences(name):
    given = inputs([0.05, -0.3, 0.4], [0.7, -0.4, 1.1])

    def total(logprobs):
        return LOSSES[name](replace(given, logprobs=logprobs)).per_token.sum()

    assert torch.autograd.gradcheck(total, given.logprobs.clone().requires_grad_(), eps=1e-6, atol=1e-6)


def test_kl_estimators():
    logprobs, reference = torch.tensor([0.0, 0.0]), torch.tensor([LOG2, -LOG2])  # log p - log ref: -log 2, log 2
    assert KL["k1"](logprobs, reference).tolist() == pytest.approx([-LOG2, LOG2])
    assert KL["k2"](logprobs, reference).tolist() == pytest.approx([LOG2**2 / 2] * 2)
    assert KL["k3"](logprobs, reference).tolist() == pytest.approx([2 - 1 - LOG2, 0.5 - 1 + LOG2])
    assert KL["abs"](logprobs, reference).tolist() == pytest.approx([LOG2] * 2)


# Corrections: one row with trainer over rollout ratios of 1/2, 4 and a masked token


def correct(name, log_ratios, mask, **options):
    old = torch.tensor([log_ratios], dtype=torch.float64) - 3.0
    rollout = torch.full_like(old, -3.0)
    factors, told = CORRECTIONS[name](
        old.requires_grad_(), rollout, torch.tensor([mask], dtype=torch.float64), **options
    )
    assert not factors.requires_grad
    return factors[0].tolist(), float(told["fraction"])


ROW = ([-LOG2, 2 * LOG2, 9.0], [1, 1, 0])


@pytest.mark.parametrize(
    ("name", "options", "factors", "fraction"),
    [
        ("token_truncation", {"cap": 2.0}, [0.5, 2.0, 1.0], 0.5),
        ("sequence_truncation", {"cap": 1.5}, [1.5, 1.5, 1.0], 1.0),  # the product is 2
        ("sequence_truncation", {"cap": 3.0}, [2.0, 2.0, 1.0], 0.0),
        ("token_mask", {"low": 0.4, "high": 3.0}, [0.5, 0.0, 1.0], 0.5),
        ("geometric_mask", {"low": 0.9, "high": 1.4}, [0.0, 0.0, 1.0], 1.0),  # sqrt(2) = 1.414
        ("geometric_mask", {"low": 0.9, "high": 1.5}, [1.0, 1.0, 1.0], 0.0),
        ("veto", {"least": 0.6}, [0.0, 0.0, 1.0], 1.0),
        ("veto", {"least": 0.4}, [1.0, 1.0, 1.0], 0.0),
    ],
)
def test_corrections_by_hand(name, options, factors, fraction):
    found, touched = correct(name, *ROW, **options)
    assert found == pytest.approx(factors) and touched == pytest.approx(fraction)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_of_nothing_and_of_too_much(name):
    assert correct(name, [1.0, 2.0], [0, 0]) == ([1.0, 1.0], 0.0)
    assert all(map(math.isfinite, correct(name, [50.0, -50.0], [1, 1])[0]))
    with pytest.raises(ValueError, match=r"rollout_logprobs\[0, 0\] must be finite"):
        CORRECTIONS[name](torch.zeros(1, 1), torch.full((1, 1), -math.inf), torch.ones(1, 1))


def test_what_there_is_to_correct():
    old, rollout = torch.tensor([[-LOG2, 2 * LOG2, 9.0]]), torch.zeros(1, 3)
    told = mismatch(old, rollout, torch.tensor([[1.0, 1.0, 0.0]]))
    assert float(told["ratio_max"]) == pytest.approx(4.0)
    assert float(told["k1"]) == pytest.approx(-LOG2 / 2)  # minus the mean of -log 2 and 2 log 2
    assert float(told["k3"]) == pytest.approx(((0.5 - 1 + LOG2) + (4 - 1 - 2 * LOG2)) / 2)
    assert float(told["perplexity_ratio"]) == pytest.approx(2**-0.5)
