"""Columns: there and back without a loss, and clear words where they are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing.fakes import make_trajectory

from vlmrl.samples import concat, from_columns, step_wise, to_columns
from vlmrl.types import ExpertRouting

LITERAL = {
    "prompt_token_ids": [[1, 2], [3]],
    "response_ids": [[5, 6, 7], [8, 9]],
    "rewards": [0.5, 1.0],
    "loss_masks": [[1, 1, 0], [1, 1]],
    "stop_reasons": ["stop", "length"],
    "rollout_metrics": {"calls": 2},
    "rollout_logprobs": [[-0.1, -0.2, 0.0], [-0.3, -0.4]],
    "trajectory_ids": ["step1/0/0", "step1/0/1"],
    "rollout_expert_indices": None,
    "is_last_step": [True, True],
}


def test_columns_hold_all_of_a_sample():
    samples = [*step_wise(make_trajectory("a")), *concat(make_trajectory("b"))]
    assert from_columns(to_columns(samples, {"calls": 1.0})) == [replace(sample) for sample in samples]


def test_the_fields_of_the_field_are_enough():
    first, second = from_columns(LITERAL)
    assert (first.rewards, second.rewards) == ({1: 0.5}, {1: 1.0})  # on the last trained token
    assert (first.group_id, second.trajectory_id, second.stop_reason) == ("step1/0", "step1/0/1", "length")
    assert (first.policy_versions, first.media, first.advantage) == ([0, 0, 0], [], None)


def test_rewards_by_token_and_unknown_logprobs():
    columns = LITERAL | {"rewards": [[0.0, 1.0, 0.0], [0.25, 0.75]], "rollout_logprobs": None}
    first, second = from_columns(columns)
    assert (first.rewards, second.reward, first.rollout_logprobs) == ({1: 1.0}, 1.0, None)
    assert to_columns([first, second])["rewards"] == [[0.0, 1.0, 0.0], [0.25, 0.75]]
    assert to_columns([first, second])["rollout_logprobs"] is None


def test_expert_indices_include_the_prompt_and_may_lack_the_last_token():
    experts = [
        [[[token, 9]] for token in range(5)],
        [[[7, 2]], [[-1, -1]]],
    ]  # one layer, top 2; the second row has 3 tokens
    first, second = from_columns(LITERAL | {"rollout_expert_indices": experts})
    assert first.expert_routing[4] == ExpertRouting(bytes([4, 0, 9, 0]), top_k=2) and len(first.expert_routing) == 5
    assert second.expert_routing == [ExpertRouting(bytes([7, 0, 2, 0]), top_k=2), None, None]
    column = to_columns([first, second])["rollout_expert_indices"]
    assert [rows.tolist() for rows in column] == [experts[0], [[[7, 2]], [[-1, -1]], [[-1, -1]]]]
    assert from_columns(to_columns([first, second])) == [first, second]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [[0.0, 1.0], 1.0]}, "column 'rewards', row 0, has 2 entries, but loss_masks has 3 in that row"),
        ({"is_last_step": None}, "column 'is_last_step' must be given"),
        ({"trajectory_ids": ["a"]}, "column 'trajectory_ids' has 1 rows, but prompt_token_ids has 2"),
        ({"stop_reason": ["stop"] * 2}, "column 'stop_reason' is not known"),
        (
            {"rollout_expert_indices": [[0], [1]]},
            r"row 0, must be \[tokens, layers, top_k\] of its 5 tokens, but its shape is \[1\]",
        ),
        ({"rollout_metrics": {"calls": {"search": 1}}}, r"rollout_metrics\['calls'\] must be one finite number"),
    ],
)
def test_what_is_wrong_with_columns_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_columns(LITERAL | change)
