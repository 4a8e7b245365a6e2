"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from vlmrl.algos import ADVANTAGES, advantage, is_per_token


def advantages(name, rewards, groups, **options):
    """Of trajectories with these rewards; per token, of one token each."""
    given = torch.tensor(rewards, dtype=torch.float64)
    return compute(name, given, groups, **options).tolist()


def compute(name, rewards, groups, **options):
    if is_per_token(ADVANTAGES[name]):
        return ADVANTAGES[name](rewards[:, None], list(groups), torch.ones(len(rewards), 1), **options)[:, 0]
    return ADVANTAGES[name](rewards, list(groups), **options)


def test_grpo_by_hand():
    # Group a: 1, 0, 0, 1: mean 1/2, unbiased std sqrt(4 * 1/4 / 3) = 0.57735. Group b: 3, 1: mean 2, std sqrt(2).
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 1.0, 1.0])
    groups = ["a", "a", "b", "a", "a", "b"]
    got = ADVANTAGES["grpo"](rewards, groups)
    assert got.tolist() == pytest.approx([0.866025, -0.866025, 0.707107, -0.866025, 0.866025, -0.707107], abs=1e-5)
    assert ADVANTAGES["grpo"](rewards, groups, scale_by_std=False).tolist() == [0.5, -0.5, 1.0, -0.5, 0.5, -1.0]


def test_rloo_subtracts_the_mean_of_the_others():
    # Group a: 1, 0, 0, 1: the others of a 1 have mean (0 + 0 + 1) / 3, those of a 0 (1 + 0 + 1) / 3. Group b: +-2.
    got = advantages("rloo", [1.0, 0.0, 3.0, 0.0, 1.0, 1.0], "aabaab")
    assert got == pytest.approx([2 / 3, -2 / 3, 2.0, -2 / 3, 2 / 3, -2.0])


def test_maxrl_divides_by_the_groups_mean_reward():
    # Group a: 1, 0, 0, 0: mean 1/4, so (3/4) / (1/4) = 3 and -1. Group b: 3, 1: mean 2, so 1/2 and -1/2.
    got = advantages("maxrl", [1.0, 0.0, 3.0, 0.0, 0.0, 1.0], "aabaab")
    assert got == pytest.approx([3.0, -1.0, 0.5, -1.0, -1.0, -0.5])


def test_maxrl_of_a_group_without_reward_is_zero_and_its_neighbours_are_untouched():
    assert advantages("maxrl", [0.0, 1.0, 0.0, 0.0], "abab") == [0.0, 1.0, 0.0, -1.0]


def test_maxrl_refuses_a_negative_reward_and_names_it():
    with pytest.raises(ValueError, match=r"must be 0 or more, but one is -0\.5"):
        advantages("maxrl", [1.0, -0.5], "aa")


def test_reinforce_pp_counts_each_trained_token_once():
    # Tokens 1, 1, 1 and 0: mean 3/4, unbiased variance (3/16 + 9/16) / 3 = 1/4. Padding has no part in it and no advantage.
    returns, mask = torch.tensor([[1.0, 1, 1], [0, 5, 5]]).double(), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    got = ADVANTAGES["reinforce_pp"](returns, ["a", "b"], mask)
    assert got.flatten().tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5, 0, 0], abs=1e-5)


def test_the_group_baseline_is_the_mean_over_trajectories_not_tokens():
    # Group a: 1 (three tokens) and 0 (one): +-1/2. Group b: 2 alone keeps 2. Tokens 1/2 three times, -1/2, 2: mean 3/5,
    # unbiased variance (3 * 0.01 + 1.21 + 1.96) / 4 = 0.8.
    returns = torch.tensor([[1.0, 1, 1], [0, 0, 0], [2, 2, 2]]).double()
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 0, 0]])
    got = ADVANTAGES["reinforce_pp"](returns, ["a", "a", "b"], mask, group_baseline=True)[mask > 0]
    wanted = [-0.1, -0.1, -0.1, -1.1, 1.4]
    assert got.tolist() == pytest.approx([value / math.sqrt(0.8) for value in wanted], abs=1e-5)


def test_reinforce_pp_without_trained_tokens_gives_nothing():
    assert ADVANTAGES["reinforce_pp"](torch.ones(2, 1), ["a", "a"], torch.zeros(2, 1)).tolist() == [[0.0], [0.0]]


def test_an_advantage_is_per_trajectory_unless_it_is_declared():
    assert [name for name, function in ADVANTAGES.items() if is_per_token(function)] == ["reinforce_pp"]
    assert is_per_token(advantage(per_token=True)(lambda returns, group_ids, mask: returns))


def test_reinforce_pp_whitens_the_whole_batch():
    # 4, 0, 2, 2: mean 2, unbiased variance (4 + 4 + 0 + 0) / 3, so 2 / sqrt(8 / 3) = sqrt(3 / 2).
    got = advantages("reinforce_pp", [4.0, 0.0, 2.0, 2.0], "aabb")
    assert got == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0.0, 0.0], abs=1e-5)


def test_reinforce_pp_with_a_group_baseline_subtracts_it_first():
    # Group a: 5, 3: +-1. Group b: 1, -1: +-1. Whitened: mean 0, unbiased variance 4 / 3, so +-sqrt(3) / 2.
    got = advantages("reinforce_pp", [5.0, 3.0, 1.0, -1.0], "aabb", group_baseline=True)
    assert got == pytest.approx([0.866025, -0.866025, 0.866025, -0.866025], abs=1e-5)


@pytest.mark.parametrize(("name", "wanted"), [("grpo", 0.7), ("rloo", 0.0), ("maxrl", 0.0), ("reinforce_pp", 0.0)])
def test_a_group_of_one(name, wanted):
    assert advantages(name, [0.7], "a") == [wanted]
    if name != "reinforce_pp":
        assert advantages(name, [1.0, 0.7, 0.0], "aba")[1] == wanted


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_no_advantage(name):
    assert advantages(name, [2.0, 2.0, 2.0, 2.0], "aabb") == [0.0] * 4
    # In float32 the mean of eight 10.1 is 1e-6 off, as much as what keeps the division by the std finite.
    assert compute(name, torch.full((8,), 10.1), "a" * 8).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_another_groups_rewards_do_not_matter_and_a_groups_advantages_sum_to_zero(name):
    alone = advantages(name, [1.0, 0.0, 0.5], "aaa")
    assert sum(alone) == pytest.approx(0.0, abs=1e-12)
    beside = advantages(name, [100.0, 1.0, 7.0, 0.0, 0.5, 0.0], "babaab")
    assert [beside[i] for i in (1, 3, 4)] == pytest.approx(alone)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_huge_and_tiny_rewards_stay_finite_and_the_rewards_are_not_written_to(name):
    for scale in (1e-30, 1e15):
        rewards = torch.tensor([1.0, 0.0, 0.0, 1.0]) * scale
        before = rewards.clone()
        assert compute(name, rewards, "aaaa").isfinite().all() and torch.equal(rewards, before)
