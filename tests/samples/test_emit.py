"""Trajectories become rows: literal tokens in, literal rows out."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

from testing.fakes import PAD, make_item, make_trajectory, make_turn

from vlmrl.samples import concat, merge_prefixes, step_wise


def test_concat_gives_responses_mask_1_and_observations_mask_0():
    (row,) = concat(make_trajectory())
    assert row.prompt_token_ids == [1, PAD, PAD, 2]
    assert row.response_ids == [5, 6, 7, PAD, PAD, PAD, 8, 5, 4, 6]
    assert row.loss_mask == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert row.rollout_logprobs == [-0.1, -0.2, 0, 0, 0, 0, 0, -0.3, -0.4, -0.5]
    assert row.rewards == {1: 0.25, 9: 1.0}
    assert row.policy_versions == [3] * 10
    assert row.image_ids == ["red", "blue"]
    assert (row.group_id, row.trajectory_id, row.is_last_step, row.stop_reason) == ("g", "t", True, "length")
    assert row.advantage is None
    assert row.reward == 1.25
    assert len(row) == 14


def test_a_turns_reward_and_the_final_one_meet_on_the_last_token():
    turns = [make_turn([1], [5, 6], [-0.1, -0.2], reward=-0.5), make_turn([7], [8], [-0.3], reward=0.25)]
    (row,) = concat(make_trajectory(turns=turns, final_reward=2.0))
    assert row.rewards == {1: -0.5, 3: 2.25}


def test_rewards_nobody_gave_are_zero():
    turns = [make_turn([1], [5], [-0.1], reward=None), make_turn([7], [8], [-0.3], reward=0.5)]
    (row,) = concat(make_trajectory(turns=turns, final_reward=None))
    assert row.rewards == {2: 0.5}


def test_observations_take_the_policy_version_of_the_next_response():
    turns = [
        make_turn([1], [5, 6], [0.0, 0.0], policy_versions=[3, 4]),
        make_turn([7, 7], [8, 8], [0.0, 0.0], policy_versions=[5, 6]),
    ]
    (row,) = concat(make_trajectory(turns=turns))
    assert row.policy_versions == [3, 4, 5, 5, 5, 6]


def test_images_are_held_by_reference_and_one_image_may_come_twice():
    item = make_item("red", 1)
    turns = [make_turn([PAD], [5], [0.0], media=[item]), make_turn([PAD], [5], [0.0], media=[item])]
    (row,) = concat(make_trajectory(turns=turns))
    assert row.media[0] is row.media[1] is item


def test_concat_leaves_the_trajectory_as_it_was():
    def lists(trajectory):
        return [
            asdict(turn, dict_factory=lambda fields: {k: v for k, v in fields if k != "media"})
            for turn in trajectory.turns
        ]

    trajectory = make_trajectory()
    trajectory.turns = [copy.copy(turn) for turn in trajectory.turns]
    for turn in trajectory.turns:
        turn.media = []
    before = copy.deepcopy(lists(trajectory))
    (row,) = concat(trajectory)
    for values in (row.prompt_token_ids, row.response_ids, row.rollout_logprobs, row.policy_versions):
        values[:] = [0] * len(values)
    row.media.append(make_item("green", 1))
    assert lists(trajectory) == before


def without_logprobs(rows):
    return [replace(row, rollout_logprobs=None) for row in rows]


def test_rows_without_rollout_logprobs_are_merged_as_those_with_them():
    rows = step_wise(make_trajectory())
    (known,), (row,) = merge_prefixes(rows), merge_prefixes(without_logprobs(rows))
    assert row.prompt_token_ids == [1, PAD, PAD, 2]
    assert row.response_ids == [5, 6, 7, PAD, PAD, PAD, 8, 5, 4, 6]
    assert row.loss_mask == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert (row.rewards, row.policy_versions, row.is_last_step) == ({9: 1.25}, [3] * 10, True)
    assert row.rollout_logprobs is None and replace(row, rollout_logprobs=known.rollout_logprobs) == known


def test_rows_without_rollout_logprobs_are_not_merged_across_another_image():
    first, second = without_logprobs(step_wise(make_trajectory()))
    second.media[0] = make_item("green", 2)
    assert merge_prefixes([first, second]) == [first, second]


def test_known_logprobs_are_not_given_up_to_merge_a_row():
    first, second = step_wise(make_trajectory())
    assert merge_prefixes([first, *without_logprobs([second])]) == [first, *without_logprobs([second])]
    assert merge_prefixes([*without_logprobs([first]), second]) == [*without_logprobs([first]), second]
