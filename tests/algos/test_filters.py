"""Filters and the price of length, on literal trajectories."""

import pytest
from testing.fakes import make_trajectory

from vlmrl.algos import FILTERS
from vlmrl.algos.filters import is_overlong, soft_overlong_penalty


def group(*rewards, **fields):
    return [make_trajectory(turns=[], final_reward=reward, **fields) for reward in rewards]


DEAD = group(7.0, ending="error") + group(-7.0, ending="aborted")


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((1.0, 0.0, 0.0), True),
        ((1.0, 1.0, 1.0), False),
        ((0.5,), True),  # a group of one has nothing to be equal to
        ((0.1 + 0.2, 0.3), False),  # 5.6e-17 apart
        ((0.3, 0.3 + 1e-6), True),
    ],
)
def test_zero_variance_keeps_groups_whose_rewards_differ(rewards, kept):
    assert FILTERS["zero_variance"](group(*rewards)) is kept


def test_zero_variance_keeps_a_group_with_one_live_member():
    assert FILTERS["zero_variance"](group(0.5) + DEAD)


def test_zero_variance_counts_the_rewards_of_the_turns_too():
    assert FILTERS["zero_variance"]([make_trajectory(final_reward=0.0), make_trajectory(final_reward=0.25)])
    # Turn rewards 0.25, final 0; no turns, final 0.25.
    assert not FILTERS["zero_variance"]([make_trajectory(final_reward=0.0), *group(0.25)])


@pytest.mark.parametrize(
    ("rewards", "options", "kept"),
    [
        ((0.0, 0.0), {}, False),  # mean 0: not strictly above
        ((1.0, 1.0), {}, False),  # mean 1: not strictly below
        ((0.5,), {}, True),  # equal rewards may lie in the band
        ((1.0, 0.0), {"low": 0.5}, False),  # mean 1/2
        ((1.0, 0.0, 0.0, 0.0), {"low": 0.2, "high": 0.3}, True),  # mean 1/4
        ((1.0, 1.0, 0.0), {"low": 0.2, "high": 0.6}, False),  # mean 2/3
        ((1e30, -1e30, 0.5, 1.0), {"high": 0.5}, True),  # mean 3/8
    ],
)
def test_reward_band_keeps_mean_rewards_strictly_within(rewards, options, kept):
    assert FILTERS["reward_band"](group(*rewards), **options) is kept


@pytest.mark.parametrize("name", FILTERS)
def test_failed_members_and_those_without_reward_do_not_count(name):
    assert FILTERS[name](group(1.0, 0.0) + DEAD + group(None))
    assert not FILTERS[name](group(0.0, 0.0) + DEAD + group(None))


@pytest.mark.parametrize("name", FILTERS)
def test_a_group_with_nothing_live_is_dropped(name):
    assert [FILTERS[name](members) for members in ([], DEAD, group(None, None))] == [False] * 3


def test_overlong_is_what_a_length_limit_cut_off():
    endings = ("max_tokens", "length", "env_done", "max_turns", "aborted", "error", None)
    assert [is_overlong(make_trajectory(ending=ending)) for ending in endings] == [True, True] + [False] * 5


def test_soft_overlong_penalty_falls_from_the_buffers_start_to_the_limit():
    # Limit 100, buffer 20: ((100 - 20) - length) / 20 between 80 and 100.
    expected = {0: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 99: -0.95, 100: -1.0, 101: -1.0, 10**9: -1.0}
    assert {length: soft_overlong_penalty(length, 100, 20) for length in expected} == pytest.approx(expected)
    assert soft_overlong_penalty(25, limit=100, buffer=100) == pytest.approx(-0.25)  # over the whole length
    assert soft_overlong_penalty(1000, limit=100, buffer=0) == 0.0  # a buffer of 0 turns it off
