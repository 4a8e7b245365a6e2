"""Formulas against numbers worked out by hand."""

import math

import pytest
import torch

from vlmrl.algos import ADVANTAGES, KL, LOSSES, REDUCTIONS, LossInputs


def inputs(logprobs, old, advantages, mask, ref=None):
    tensor = torch.tensor
    return LossInputs(
        logprobs=tensor(logprobs, dtype=torch.float64, requires_grad=True),
        old_logprobs=tensor(old, dtype=torch.float64),
        rollout_logprobs=tensor(old, dtype=torch.float64),
        advantages=tensor(advantages, dtype=torch.float64),
        loss_mask=tensor(mask, dtype=torch.float64),
        ref_logprobs=None if ref is None else tensor(ref, dtype=torch.float64),
    )


def test_grpo_by_hand():
    # Group a: 1, 0, 0, 1: mean 1/2, unbiased std sqrt(4 * 1/4 / 3) = 0.57735. Group b: 3, 1: mean 2, std sqrt(2).
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 1.0, 1.0])
    groups = ["a", "a", "b", "a", "a", "b"]
    got = ADVANTAGES["grpo"](rewards, groups)
    assert got.tolist() == pytest.approx([0.866025, -0.866025, 0.707107, -0.866025, 0.866025, -0.707107], abs=1e-5)
    assert ADVANTAGES["grpo"](rewards, groups, scale_by_std=False).tolist() == [0.5, -0.5, 1.0, -0.5, 0.5, -1.0]


def test_grpo_of_equal_rewards_is_zero_and_of_one_is_the_reward():
    assert ADVANTAGES["grpo"](torch.tensor([2.0, 2.0, 2.0]), ["a"] * 3).tolist() == [0.0, 0.0, 0.0]
    assert ADVANTAGES["grpo"](torch.tensor([0.7]), ["a"]).tolist() == pytest.approx([0.7])


def test_ppo_clips_high_and_low_on_their_own():
    # Ratios 1.5 and 0.5 with advantages 1, -1: clip to 1.28 and 0.8.
    #   r=1.5, A=+1: min(1.5, 1.28) = 1.28 (clipped);  r=1.5, A=-1: min(-1.5, -1.28) = -1.5
    #   r=0.5, A=+1: min(0.5, 0.8) = 0.5;              r=0.5, A=-1: min(-0.5, -0.8) = -0.8 (clipped)
    up, down = math.log(1.5), math.log(0.5)
    data = inputs([[up, up, down, down]], [[0.0] * 4], [[1.0, -1.0, 1.0, -1.0]], [[1, 1, 1, 1]])
    got = LOSSES["ppo"](data, clip_low=0.2, clip_high=0.28)
    assert got.per_token.tolist()[0] == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert got.metrics["clip_fraction"].tolist() == [[1.0, 0.0, 0.0, 1.0]]
    got.per_token.sum().backward()
    assert data.logprobs.grad.tolist()[0] == pytest.approx([0.0, 1.5, -0.5, 0.0])  # no gradient where it is clipped


def test_ppo_survives_a_huge_log_ratio():
    data = inputs([[50.0, -50.0]], [[0.0, 0.0]], [[-1.0, -1.0]], [[1, 1]])
    got = LOSSES["ppo"](data).per_token.tolist()[0]
    assert got[0] == pytest.approx(math.exp(20.0)) and got[1] == pytest.approx(0.8)


def test_ppo_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 5)
    old = torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.ones(shape, dtype=torch.float64)

    def loss(logprobs):
        return LOSSES["ppo"](LossInputs(logprobs, old, old, advantages, mask)).per_token.sum()

    start = (old + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(loss, start)


def test_sft_is_the_negative_logprob():
    assert LOSSES["sft"](inputs([[-0.5, -2.0]], [[0.0, 0.0]], [[9.0, 9.0]], [[1, 0]])).per_token.tolist() == [
        [0.5, 2.0]
    ]


def test_kl_estimators_by_hand():
    # log p = -1, log ref = -1.5: log ratio p/ref = 0.5, so k1 = 0.5, k2 = 0.125, k3 = exp(-0.5) - 1 + 0.5 = 0.10653.
    p, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert KL["k1"](p, ref).item() == pytest.approx(0.5)
    assert KL["k2"](p, ref).item() == pytest.approx(0.125)
    assert KL["k3"](p, ref).item() == pytest.approx(0.106531, abs=1e-6)
    assert KL["k3"](p, p).item() == 0.0


def test_token_mean_counts_the_whole_mini_batch():
    weights = REDUCTIONS["token_mean"](torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    assert torch.allclose(weights, torch.tensor([[1 / 3, 0.0], [1 / 3, 1 / 3]]))
    assert REDUCTIONS["token_mean"](torch.zeros(2, 2), ["a", "b"]).sum() == 0


def test_prompt_mean_gives_each_group_the_same_weight():
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    weights = REDUCTIONS["prompt_mean"](mask, ["a", "b", "b"])
    assert torch.allclose(weights, torch.tensor([[1 / 2, 0.0], [1 / 6, 1 / 6], [0.0, 1 / 6]]))
    masked = REDUCTIONS["prompt_mean"](torch.tensor([[0.0, 0.0], [1.0, 1.0]]), ["a", "b"])
    assert torch.allclose(masked, torch.tensor([[0.0, 0.0], [0.5, 0.5]]))
