"""Settings of the algorithm that cannot work, or would do nothing, are refused when the config is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl.config import Algo, Config, Rollout, Train


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_sampling": "filter"}, "algo.filters must be set with dynamic_sampling"),
        (
            {"options": {"veto.least": 0.1}},
            r"algo.options must be FUNCTION.NAME of one of \['grpo', 'ppo'\], but it is 'veto.least'",
        ),
        ({"options": {"clip_low": 0.1}}, "algo.options must be FUNCTION.NAME of one of .*, but it is 'clip_low'"),
        (
            {"loss": "a.py:mine", "advantage": "b.py:mine", "options": {"mine.k": 1}},
            "algo.options must be of functions of different names, and two settings name 'mine'",
        ),
        (
            {"old_policy": "rollout", "corrections": ("veto",)},
            "algo.corrections must be unset with algo.old_policy rollout",
        ),
        ({"credit": "turn", "advantage": "reinforce_pp"}, "algo.advantage must be a group baseline with credit turn"),
        ({"options": {"critic.lr": 1e-3}}, "algo.options must be FUNCTION.NAME of one of .*, but it is 'critic.lr'"),
        (
            {"advantage": "gae", "options": {"gae.level": "turn", "critic.lr": 1e-3}},
            r"algo.advantage must not be gae: it needs a critic, and vlmrl trains none\. Use a group baseline, such as grpo",
        ),
        (
            {"advantage": "maxrl", "kl": "k1", "kl_coef": 0.1},
            "algo.kl must be k2, k3 or abs with algo.advantage maxrl",
        ),
        ({"advantage": "maxrl", "overlong_buffer": 5}, "algo.overlong_buffer must be 0 with algo.advantage maxrl"),
    ],
)
def test_algo_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Algo(**settings)


def test_k1_is_right_in_the_reward():
    assert Algo(kl_coef=0.1, kl="k1").kl_in_reward and not Algo(kl_coef=0.1, kl="k2").kl_in_reward
    assert not Algo(kl="k1").kl_in_reward  # no penalty at all


LENGTH = Rollout(max_tokens=200, max_response_tokens=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algo": Algo(overlong_buffer=201), "rollout": LENGTH},
            r"algo.overlong_buffer must be at most rollout.max_tokens \(200\), but it is 201",
        ),
        (
            {"algo": Algo(advantage="maxrl"), "rollout": Rollout(truncated_reward=-0.5)},
            "rollout.truncated_reward must be 0 or more with algo.advantage maxrl, .* but it is -0.5",
        ),
        (
            {"algo": Algo(advantage="rloo"), "rollout": Rollout(group_size=1)},
            "rollout.group_size must be 2 or more with algo.advantage rloo",
        ),
        (
            {"algo": Algo(advantage="maxrl"), "rollout": Rollout(group_size=1)},
            "rollout.group_size must be 2 or more with algo.advantage maxrl",
        ),
    ],
)
def test_settings_of_two_sections_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_what_is_near_the_limit_is_accepted():
    Config(algo=Algo(overlong_buffer=200), rollout=LENGTH)
    Config(algo=Algo(advantage="maxrl"), rollout=Rollout(truncated_reward=0.0))
    Config(algo=Algo(advantage="reinforce_pp"), rollout=replace(LENGTH, group_size=1, samples="step_wise"))


def test_a_full_batch_has_so_many_optimizer_steps():
    assert Train(groups_per_batch=16).steps_per_batch == 1
    assert Train(groups_per_batch=16, groups_per_step=4).steps_per_batch == 4
