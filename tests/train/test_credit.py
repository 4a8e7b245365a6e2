"""Advantages reach the right tokens, by trajectory and by turn, in every form of the samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from testing.fakes import linked, make_trajectory, make_turn
from testing.runs import short_quickstart

from vlmrl.algos import advantage
from vlmrl.config import Algo, Config, Rollout, Train
from vlmrl.run.build import build_run
from vlmrl.samples import concat, step_wise
from vlmrl.train.credit import assign_advantages, shaped_reward
from vlmrl.train.turn_states import rewards_by_turn

PLAIN = {"grpo.scale_by_std": False}


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


@pytest.mark.parametrize("credit", ["turn", "gigpo"])
def test_members_whose_summaries_came_at_different_times_are_compared_by_the_turns_of_the_env(credit):
    """They did the same for the same rewards: nothing distinguishes them, nor a summary from the response after it."""

    def played(name, *kinds):
        turns = [make_turn([1, 2], [5, 6], [-0.1, -0.2], reward=None if kind == "asked" else 1.0) for kind in kinds]
        states = 0
        for turn, kind in zip(turns, kinds, strict=True):
            turn.asked, states = kind == "asked", states + (kind != "asked")
            turn.next_state = f"s{states}"
        return make_trajectory(name, turns=turns, final_reward=None)

    trajectories = [played("a", "", "", ""), played("b", "", "asked", "", ""), played("c", "", "", "asked", "")]
    samples = [sample for trajectory in trajectories for sample in step_wise(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(credit=credit)))
    assert {value for sample in samples for value in sample.advantage} == {0.0}
    more = played("d", "", "", "asked")  # a budget cut the summary: it stands for the turn that did not come
    more.turns[0].reward = 2.0
    both = [trajectories[0], more]
    samples = [sample for trajectory in both for sample in step_wise(trajectory)]
    assign_advantages(samples, both, Config(algo=Algo(credit="turn", options=PLAIN)))
    assert [sample.advantage[0] for sample in samples] == [0.0, 0.5, 0.5, 0.0, -0.5, -0.5]


def test_one_number_for_a_whole_episode():
    trajectories = group()  # rewards 4, 1, 5; mean 10/3
    samples = [sample for trajectory in trajectories for sample in step_wise(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(options=PLAIN)))
    assert [s.advantage for s in samples] == pytest.approx([2 / 3, 2 / 3, -7 / 3, -7 / 3, 5 / 3])


@pytest.mark.parametrize("form", [concat, step_wise])
def test_credit_by_turn_compares_returns_to_go(form):
    trajectories = group()  # returns-to-go of turn 0: 4, 1, 5 (mean 10/3); of turn 1: 3, 1 (mean 2)
    samples = [sample for trajectory in trajectories for sample in form(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(credit="turn", options=PLAIN)))
    trained = [
        advantage
        for sample in samples
        for advantage, mask in zip(sample.advantage, sample.loss_mask, strict=True)
        if mask
    ]
    a, b, c = [2 / 3, 2 / 3, 1, 1], [-7 / 3, -7 / 3, -1, -1], [5 / 3, 5 / 3]
    assert trained == pytest.approx([*a, *b, *c])
    assert all(not x for s in samples for x, mask in zip(s.advantage, s.loss_mask, strict=True) if not mask)


def outcome_group(*rewards, turns=(2, 2, 5), names="abc"):
    """Members that get their reward at the end, after as many turns of two tokens."""
    response = {"prompt_ids": [1, 2], "response_ids": [5, 6], "logprobs": [-0.1, -0.2]}
    return [
        make_trajectory(name, turns=[make_turn(**response) for _ in range(count)], final_reward=reward)
        for name, count, reward in zip(names, turns, rewards, strict=True)
    ]


def by_trajectory(trajectories, form, **algo):
    """The advantage of each trained token, by trajectory, without repetitions."""
    samples = [sample for trajectory in trajectories for sample in form(trajectory)]
    assign_advantages(samples, trajectories, Config(algo=Algo(credit="turn", **algo)))
    advantages = {}
    for sample in samples:
        trained = [a for a, mask in zip(sample.advantage, sample.loss_mask, strict=True) if mask]
        advantages.setdefault(sample.trajectory_id, []).extend(trained[::2])
    return advantages


@pytest.mark.parametrize("form", [concat, step_wise])
def test_a_turn_that_one_member_reaches_has_the_advantage_of_the_trajectory(form):
    # 11, 10, 11: mean 32/3, std sqrt((1/9 + 4/9 + 1/9) / 2) = sqrt(1/3).
    got = by_trajectory(outcome_group(11.0, 10.0, 11.0), form)
    high, low = math.sqrt(3) / 3, -math.sqrt(3) * 2 / 3
    assert got["a"] == pytest.approx([high] * 2, abs=1e-5)
    assert got["b"] == pytest.approx([low] * 2, abs=1e-5)
    assert got["c"] == pytest.approx([high] * 5, abs=1e-5)


@pytest.mark.parametrize("form", [concat, step_wise])
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "maxrl"])
def test_equal_rewards_have_no_advantage_in_any_turn(form, advantage):
    got = by_trajectory(outcome_group(11.0, 11.0, 11.0), form, advantage=advantage)
    assert got == {"a": [0.0] * 2, "b": [0.0] * 2, "c": [0.0] * 5}


def test_the_turns_of_a_group_of_one_have_nobody_to_be_compared_with():
    turns = [make_turn([1], [5, 6], [-0.1, -0.2], reward=reward) for reward in (1.0, 3.0)]
    alone = make_trajectory(turns=turns, final_reward=None)
    # Grpo keeps the reward of a group of one: here the return-to-go.
    assert by_trajectory([alone], concat) == {"t": [4.0, 3.0]}
    assert by_trajectory([alone], concat, advantage="rloo") == {"t": [0.0, 0.0]}


def test_credit_by_turn_refuses_rows_in_which_turns_cannot_be_told_apart():
    trajectories = group()
    samples = [sample for trajectory in trajectories for sample in concat(trajectory)]
    samples[1].responses = []
    with pytest.raises(ValueError, match="trajectory b: a sample does not say where its turns' responses are"):
        assign_advantages(samples, trajectories, Config(algo=Algo(credit="turn")))


WHITENED = Algo(advantage="reinforce_pp")


@pytest.mark.parametrize("form", [concat, step_wise])
def test_reinforce_pp_whitens_over_trained_tokens(form):
    long, short = outcome_group(1.0, 0.0, turns=(3, 1), names="ab")
    samples = [sample for trajectory in (long, short) for sample in form(trajectory)]
    assign_advantages(samples, [long, short], Config(algo=WHITENED))
    # 6 tokens of 1 and 2 of 0: mean 3/4, unbiased variance (6/16 + 2 * 9/16) / 7 = 3/14.
    std = math.sqrt(3 / 14)
    for sample in samples:
        wanted = {"a": 0.25 / std, "b": -0.75 / std}[sample.trajectory_id]
        assert sample.advantage == pytest.approx([wanted * mask for mask in sample.loss_mask], abs=1e-5)


# An advantage for each token, and one for a trajectory.
@pytest.mark.parametrize("algo", [WHITENED, Algo(options=PLAIN)])
def test_shuffled_rewards_keep_their_values_but_not_their_places(algo):
    trajectories = outcome_group(*map(float, range(8)), turns=[1] * 8, names="abcdefgh")
    samples, given = [sample for trajectory in trajectories for sample in concat(trajectory)], []
    for shuffled in (False, True):
        assign_advantages(samples, trajectories, Config(algo=algo, train=Train(shuffle_rewards=shuffled)))
        given.append([sample.advantage for sample in samples])
    assert given[1] != given[0] == sorted(given[0]) == sorted(given[1])


@pytest.mark.parametrize("form", [concat, step_wise])
def test_reinforce_pp_subtracts_the_kl_of_each_token_and_those_after_it(form):
    long, short = outcome_group(1.0, 0.0, turns=(2, 1), names="ab")
    samples = [sample for trajectory in (long, short) for sample in form(trajectory)]
    values = iter([0.5, 0.25, 1.0, -0.5, 2.0, 0.25])  # nats, of the trained tokens in order
    kl = [np.array([next(values) if mask else 7.0 for mask in sample.loss_mask], np.float32) for sample in samples]
    algo = Algo(advantage="reinforce_pp", kl_coef=2.0, kl="k1")
    assign_advantages(samples, [long, short], Config(algo=algo), kl)
    # To go: 1.25, 0.75, 0.5, -0.5 and 2.25, 0.25 nats, of which 2 are subtracted for each.
    returns = [-1.5, -0.5, 0.0, 2.0, -4.5, -0.5]
    mean = -5.0 / 6
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / 5)
    got = [a for s in samples for a, mask in zip(s.advantage, s.loss_mask, strict=True) if mask]
    assert got == pytest.approx([(value - mean) / std for value in returns], abs=1e-5)
    assert all(not a for s in samples for a, mask in zip(s.advantage, s.loss_mask, strict=True) if not mask)


def test_an_own_advantage_per_token_is_checked_before_the_run(tmp_path):
    mine = advantage(per_token=True)(lambda returns, group_ids, mask, scale=1.0: returns)
    config = short_quickstart(tmp_path)
    with pytest.raises(
        ValueError, match=r"algo\.credit must be trajectory with an advantage per token, but it is 'turn'"
    ):
        build_run(replace(config, algo=Algo(advantage=mine, credit="turn")))
    with pytest.raises(ValueError, match=r"algo\.options do not fit .*'skale'"):
        build_run(replace(config, algo=Algo(advantage=mine, options={"<lambda>.skale": 2.0})))


def test_other_advantages_subtract_the_kl_of_the_whole_trajectory():
    trajectories = group()  # rewards 4, 1, 5
    samples = [sample for trajectory in trajectories for sample in concat(trajectory)]
    kl = [np.where(sample.loss_mask, 0.5, 7.0) for sample in samples]  # 2, 2 and 1 nats
    algo = Algo(options=PLAIN, kl_coef=0.5, kl="k1")
    assign_advantages(samples, trajectories, Config(algo=algo), kl)
    assert [s.advantage for s in samples] == pytest.approx([0.5, -2.5, 2.0])  # of 3, 0, 4.5


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce_pp"])
def test_rewards_that_give_infinite_advantages_are_refused(name):
    trajectories = [make_trajectory(id=each, final_reward=reward) for each, reward in (("a", math.inf), ("b", 0.0))]
    rows = [row for trajectory in trajectories for row in concat(trajectory)]
    with pytest.raises(ValueError, match=rf"algo\.advantage {name} must give finite advantages.* from 0\.25 to inf"):
        assign_advantages(rows, trajectories, Config(algo=Algo(advantage=name)))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "change", [lambda given: given[:1], lambda given: given[..., None], lambda given: given.tolist()]
)
def test_an_own_advantage_of_another_shape_is_refused_by_name(change, per_token):
    @advantage(per_token=per_token)
    def mine(rewards, group_ids, *mask):
        return change(rewards)

    trajectories = group()
    samples = [sample for trajectory in trajectories for sample in concat(trajectory)]
    shape = r"\[3, 4\]" if per_token else r"\[3\]"
    words = rf"algo\.advantage \S+mine must return a tensor of the rewards' shape {shape}, but it returned (one of shape \[|a list)"
    with pytest.raises(ValueError, match=words):
        assign_advantages(samples, trajectories, Config(algo=Algo(advantage=mine)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda rewards: [row[:1] for row in rewards], r"a list for each trajectory, .* returned \[\["),
        (lambda rewards: [1.0] * len(rewards), r"a list for each trajectory, .* returned \[1\.0, "),
        (lambda rewards: None, "a list for each trajectory, .* returned None"),
        (lambda rewards: [[math.nan] * len(row) for row in rewards], "finite advantages"),
    ],
)
def test_an_own_credit_of_another_form_is_refused_by_name(given, words):
    def mine(rewards, states, group_ids, advantage):
        return given(rewards)

    trajectories = group()
    samples = [sample for trajectory in trajectories for sample in step_wise(trajectory)]
    with pytest.raises(ValueError, match=rf"algo\.credit \S+mine must .*{words}"):
        assign_advantages(samples, trajectories, Config(algo=Algo(credit=mine)))


def test_the_last_turns_reward_includes_the_final_reward():
    trajectory = make_trajectory(turns=group()[0].turns, final_reward=0.5)
    assert rewards_by_turn(trajectory) == [1.0, 3.5]


def test_spans_of_responses_with_nothing_between_them_and_with_a_dropped_end_of_turn():
    turns = [make_turn([1], [5, 2], [-0.1, -0.1]), make_turn([], [6, 2], [-0.1, -0.1]), make_turn([7], [8], [-0.1])]
    trajectory = make_trajectory(turns=linked(turns, dropped=1))  # in one row: 5 | 6 | 7 8
    assert spans(concat(trajectory)) == [[(0, 0, 1), (1, 1, 2), (2, 3, 4)]]
    assert spans(step_wise(trajectory)) == [[(0, 0, 2)], [(1, 0, 2)], [(2, 0, 1)]]


def spans(rows):
    return [[(span.turn, span.start, span.end) for span in row.responses] for row in rows]


def test_a_dropped_end_of_turn_is_not_taken_for_the_next_response_after_an_empty_observation():
    turns = [make_turn([1], [5, 2], [-0.1, -0.1], reward=1.0), make_turn([], [2, 6], [-0.1, -0.1], reward=0.0)]
    first = make_trajectory("a", turns=linked(turns, dropped=1), final_reward=None)  # in one row: 5 | 2 6
    assert spans(concat(first)) == [[(0, 0, 1), (1, 1, 3)]]
    assert spans(step_wise(first)) == [[(0, 0, 2)], [(1, 0, 2)]]
    other = make_trajectory("b", turns=[make_turn([1], [7], [-0.1], reward=0.0)], final_reward=None)
    samples = [*concat(first), *concat(other)]
    algo = Algo(credit="turn", options=PLAIN)
    assign_advantages(samples, [first, other], Config(algo=algo))
    assert [s.advantage for s in samples] == [[0.5, 0.5, 0.5], [-0.5]]


def test_length_costs_only_near_the_limit():
    trajectory = make_trajectory()  # 14 tokens, reward 1.25
    config = Config(rollout=Rollout(max_tokens=20, max_response_tokens=5))
    assert shaped_reward(trajectory, config) == 1.25
    near = replace(config, algo=Algo(overlong_buffer=10))  # from 10 on: 14 costs 0.4
    assert shaped_reward(trajectory, near) == pytest.approx(0.85)


def test_a_rerendered_prompt_counts_once():
    """Six turns, each with a whole prompt of 100 tokens of its own and a response of 10: no context is longer than 110."""
    turns = [make_turn([1] * 100, [5] * 10, [-0.1] * 10) for _ in range(6)]
    trajectory = make_trajectory(turns=turns, final_reward=1.0)
    for turn in turns[1:]:
        turn.parent, turn.kept = None, 0
    assert trajectory.num_tokens == max(
        len(prompt) + len(turn.response_ids)
        for (prompt, _), turn in zip(trajectory.prompts(), trajectory.turns, strict=True)
    )
    config = Config(rollout=Rollout(max_tokens=200, max_response_tokens=20), algo=Algo(overlong_buffer=20))
    assert shaped_reward(trajectory, config) == 1.0
    longer = replace(config, algo=Algo(overlong_buffer=100))  # from 100 on: 110 costs 0.1
    assert shaped_reward(trajectory, longer) == pytest.approx(0.9)


def test_the_longest_context_is_not_always_the_last_and_dropped_tokens_count_where_they_are():
    turns = [make_turn([1] * 4, [5, 6], [-0.1] * 2), make_turn([7] * 9, [8], [-0.1]), make_turn([3], [4], [-0.1])]
    linked(turns, dropped=1)  # 6 tokens, of which 5 go on; then 5 + 9 + 1; then 2 of these and 1 + 1
    turns[2].kept = 2
    assert make_trajectory(turns=turns).num_tokens == 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algo": Algo(corrections=("veto",)), "rollout": Rollout(history="rerender")},
            "algo.corrections must be unset with re-rendered samples",
        ),
        (
            {"algo": Algo(old_policy="rollout"), "rollout": Rollout(history="rerender")},
            "algo.old_policy must not be rollout with re-rendered samples",
        ),
        (
            {"rollout": Rollout(history="rerender"), "train": Train(max_staleness=1, too_old="correct")},
            "train.too_old correct needs",
        ),
        (
            {"algo": Algo(credit="turn"), "rollout": Rollout(history="rerender")},
            "algo.credit turn is not possible with",
        ),
        (
            {"deterministic": True, "rollout": Rollout(over_sampling=1.5)},
            "rollout.over_sampling must be 1 with deterministic",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)
