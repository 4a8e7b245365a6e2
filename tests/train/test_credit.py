"""Advantages reach the right tokens, by trajectory and by turn, in every form of the samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing.fakes import make_trajectory, make_turn

from vlmrl.config import Algo, Config, Rollout, Train
from vlmrl.samples import concat, step_wise
from vlmrl.samples.emit import ReplySpan, reply_spans
from vlmrl.train.credit import assign_advantages, return_to_go, shaped_reward

PLAIN = {"scale_by_std": False}


def group():
    """Two members of two turns and one of one turn; turn rewards 1, 3 and 0, 1 and 5."""
    pays = {"a": (1.0, 3.0), "b": (0.0, 1.0), "c": (5.0,)}
    return [
        make_trajectory(
            name,
            turns=[make_turn([1, 2], [5, 6], [-0.1, -0.2], reward=reward) for reward in rewards],
            final_reward=None,
        )
        for name, rewards in pays.items()
    ]


def test_one_number_for_a_whole_episode():
    trajectories = group()  # rewards 4, 1, 5; mean 10/3
    samples = [sample for trajectory in trajectories for sample in step_wise(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(advantage_options=PLAIN)))
    assert [s.advantage for s in samples] == pytest.approx([2 / 3, 2 / 3, -7 / 3, -7 / 3, 5 / 3])


@pytest.mark.parametrize("form", [concat, step_wise])
def test_credit_by_turn_compares_returns_to_go(form):
    trajectories = group()  # returns-to-go of turn 0: 4, 1, 5 (mean 10/3); of turn 1: 3, 1 (mean 2)
    samples = [sample for trajectory in trajectories for sample in form(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(credit="turn", advantage_options=PLAIN)))
    trained = [
        advantage
        for sample in samples
        for advantage, mask in zip(sample.advantage, sample.loss_mask, strict=True)
        if mask
    ]
    a, b, c = [2 / 3, 2 / 3, 1, 1], [-7 / 3, -7 / 3, -1, -1], [5 / 3, 5 / 3]
    assert trained == pytest.approx([*a, *b, *c])
    assert all(not x for s in samples for x, mask in zip(s.advantage, s.loss_mask, strict=True) if not mask)


def test_a_return_to_go_includes_the_final_reward():
    trajectory = make_trajectory(turns=group()[0].turns, final_reward=0.5)
    assert [return_to_go(trajectory, turn) for turn in range(2)] == [4.5, 3.5]


def test_spans_of_replies_with_nothing_between_them_and_with_a_dropped_end_of_turn():
    turns = [make_turn([1], [5, 2], [-0.1, -0.1]), make_turn([], [6, 2], [-0.1, -0.1]), make_turn([7], [8], [-0.1])]
    turns[0].dropped = turns[1].dropped = 1
    trajectory = make_trajectory(turns=turns)  # in one row: 5 | 6 | 7 8
    assert reply_spans(trajectory, concat(trajectory)) == [
        ReplySpan(0, 0, 0, 1),
        ReplySpan(1, 0, 1, 2),
        ReplySpan(2, 0, 3, 4),
    ]
    assert reply_spans(trajectory, step_wise(trajectory)) == [
        ReplySpan(0, 0, 0, 2),
        ReplySpan(1, 1, 0, 2),
        ReplySpan(2, 2, 0, 1),
    ]
    rendered = [replace(row, rollout_logprobs=None) for row in concat(trajectory)]
    assert reply_spans(trajectory, rendered) == []


def test_length_costs_only_near_the_limit():
    trajectory = make_trajectory()  # 14 tokens, reward 1.25
    config = Config(rollout=Rollout(max_tokens=20, max_reply_tokens=5))
    assert shaped_reward(trajectory, config) == 1.25
    near = replace(config, algo=Algo(overlong_buffer=10))  # from 10 on: 14 costs 0.4
    assert shaped_reward(trajectory, near) == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algo": Algo(advantage="reinforce_pp"), "rollout": Rollout(samples="step_wise")},
            "reinforce_pp is defined over",
        ),
        (
            {"algo": Algo(corrections=("veto",)), "rollout": Rollout(history="rerender")},
            r"\['veto'\] must be unset with re-rendered samples",
        ),
        (
            {"algo": Algo(old_policy="rollout"), "rollout": Rollout(history="rerender")},
            "algo.old_policy rollout must be unset with re-rendered samples",
        ),
        (
            {"rollout": Rollout(history="rerender"), "train": Train(max_staleness=1, too_old="correct")},
            "train.too_old correct needs",
        ),
        ({"algo": Algo(credit="turn"), "rollout": Rollout(history="rerender")}, "algo.credit turn needs the tokens"),
        (
            {"deterministic": True, "rollout": Rollout(over_sampling=1.5)},
            "rollout.over_sampling must be 1 with deterministic",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "gae"}, "gae is not offered: it needs a critic"),
        ({"kl_in_reward": True}, "algo.kl_coef must be greater than 0 with kl_in_reward"),
        ({"dynamic_sampling": "filter"}, "algo.filters must be set with dynamic_sampling"),
        ({"correction_options": {"veto.least": 0.1}}, r"algo.correction_options must be NAME.OPTION of one of \[\]"),
        (
            {"old_policy": "rollout", "corrections": ("veto",)},
            "algo.corrections must be unset with algo.old_policy rollout",
        ),
        ({"credit": "turn", "advantage": "reinforce_pp"}, "algo.advantage must be a group baseline with credit turn"),
    ],
)
def test_algo_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Algo(**settings)
