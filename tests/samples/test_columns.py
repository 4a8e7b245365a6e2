"""Columns: there and back without a loss, and clear words where they are wrong."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch
from hostile.columns import cases
from testing.fakes import make_trajectory

from vlmrl.samples import audit, concat, from_columns, step_wise, to_columns
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
    assert from_columns(to_columns(samples, {"calls": 1.0})) == [replace(sample, responses=[]) for sample in samples]


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


def names_and_groups(ids, **more):
    rows = from_columns(
        {
            "prompt_token_ids": [[1]] * len(ids),
            "response_ids": [[5]] * len(ids),
            "rewards": [1.0] * len(ids),
            "loss_masks": [[1]] * len(ids),
            "trajectory_ids": ids,
            "is_last_step": [True] * len(ids),
        }
        | more
    )
    return [(row.trajectory_id, row.group_id) for row in rows]


@dataclass
class TrajectoryID:
    """As SkyRL's: the task's id, and which of its repetitions."""

    instance_id: str
    repetition_id: int


def test_ids_without_a_slash_are_not_all_of_one_group():
    assert names_and_groups(["a", "b"]) == [("a", "a"), ("b", "b")]
    assert names_and_groups(np.arange(2)) == [("0", "0"), ("1", "1")]
    assert names_and_groups(["step1/0/3", "7_0", "7_1"]) == [("step1/0/3", "step1/0"), ("7_0", "7"), ("7_1", "7")]
    assert names_and_groups(["_1", "a_b", "a/b_1"]) == [("_1", "_1"), ("a_b", "a_b"), ("a/b_1", "a")]


def test_ids_in_the_form_of_skyrl_are_of_the_group_of_their_instance():
    ids = [TrajectoryID("geo_1", 0), TrajectoryID("geo_1", 1), TrajectoryID("geo_2", 0)]
    assert names_and_groups(ids) == [("geo_1_0", "geo_1"), ("geo_1_1", "geo_1"), ("geo_2_0", "geo_2")]


def test_group_ids_may_be_an_array_as_verls_uids_are():
    assert names_and_groups(["a", "b"], group_ids=np.array(["u", "u"], dtype=object)) == [("a", "u"), ("b", "u")]


@pytest.mark.parametrize(
    "one", [np.float32(1), np.float64(1), np.int64(1), np.bool_(True), torch.tensor(1.0), torch.tensor(1)]
)
def test_scalars_of_numpy_and_torch_are_numbers(one):
    first, second = from_columns(
        LITERAL
        | {
            "rewards": [one, [0.0, one]],
            "loss_masks": [[one, 0, 0], [1, one]],
            "is_last_step": [one, True],
            "response_ids": [[one, 6, 7], [8, 9]],
            "rollout_metrics": {"calls": one},
        }
    )
    assert (first.rewards, second.rewards) == ({0: 1.0}, {1: 1.0})
    assert (first.loss_mask, second.loss_mask, first.is_last_step) == ([1, 0, 0], [1, 1], True)
    values = [first.rewards[0], first.loss_mask[0], first.is_last_step, first.response_ids[0]]
    assert [type(value) for value in values] == [float, int, bool, int]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_columns_and_rows_may_be_arrays(array):
    columns = {
        "prompt_token_ids": array([[1, 2], [3, 4]]),
        "response_ids": [array([5, 6]), array([8, 9])],
        "rewards": array([0.5, 0.0]),
        "loss_masks": array([[True, False], [True, True]]),
        "rollout_logprobs": array([[-0.5, 0.0], [-0.25, -1.0]]),
        "policy_versions": array([[3, 3], [4, 4]]),
        "trajectory_ids": ["g/0", "g/1"],
        "is_last_step": array([True, True]),
    }
    first, second = from_columns(columns)
    assert (first.prompt_token_ids, first.response_ids, first.loss_mask) == ([1, 2], [5, 6], [1, 0])
    assert (second.rollout_logprobs, second.policy_versions, first.rewards) == ([-0.25, -1.0], [4, 4], {0: 0.5})
    assert audit([first, second]).trained_tokens == 3


def test_expert_indices_include_the_prompt_and_may_lack_the_last_token():
    # One layer, top 2; the second row has 3 tokens.
    experts = [
        [[[token, 9]] for token in range(5)],
        [[[7, 2]], [[-1, -1]]],
    ]
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
        ({"loss_masks": [[0.5, 1, 0], [1, 1]]}, "'loss_masks', row 0, entry 0, must be 0 or 1, but it is 0.5"),
        ({"loss_masks": [[1, 1, 0], torch.tensor([1.0, 0.5])]}, "'loss_masks', row 1, entry 1, must be 0 or 1, but"),
        ({"loss_masks": [[1, 2, 0], [1, 1]]}, "'loss_masks', row 0, entry 1, must be 0 or 1, but it is 2"),
        ({"loss_masks": ["110", [1, 1]]}, "'loss_masks', row 0, must be a list, each entry 0 or 1, but it is '110'"),
        ({"response_ids": [[5, 6.5, 7], [8, 9]]}, "'response_ids', row 0, entry 1, must be a token id, but it is 6.5"),
        ({"prompt_token_ids": [[1, 2], [-3]]}, "'prompt_token_ids', row 1, entry 0, must be a token id, but it is -3"),
        ({"response_ids": [[5, 6, float("nan")], [8, 9]]}, "row 0, entry 2, must be a token id, but it is nan"),
        ({"is_last_step": [True, "False"]}, "'is_last_step', row 1, must be true or false, but it is 'False'"),
        ({"rewards": [None, 1.0]}, "'rewards', row 0, must be a list of numbers, or one number, but it is None"),
        ({"rewards": [[0.0, "1", 0.0], 1.0]}, "'rewards', row 0, entry 1, must be a number, but it is '1'"),
        ({"rollout_logprobs": [[-0.1, None, 0.0], [0, 0]]}, "'rollout_logprobs', row 0, entry 1, must be a number"),
        ({"trajectory_ids": ["a", None]}, "'trajectory_ids', row 1, must be a string or a number that names it"),
        ({"group_ids": [None, "b"]}, "'group_ids', row 0, must be a string or a number that names it, but it is None"),
        ({"stop_reasons": ["stop", None]}, "'stop_reasons', row 1, must be a string, but it is None"),
        ({"media": [["red.png"], []]}, "'media', row 0, must be a list of MediaItem"),
        ({"loss_masks": [[1, 0], [1, 1]]}, "'loss_masks', row 0, has 2 entries, but response_ids has 3 in that row"),
        (
            {"rollout_logprobs": [[-0.5, 0, 0], [-1.0]]},
            "'rollout_logprobs', row 1, has 1 entries, but response_ids has 2",
        ),
        ({"policy_versions": [[3] * 4, [4, 4]]}, "'policy_versions', row 0, has 4 entries, but response_ids has 3"),
        (
            {
                "response_ids": [[5, 6, 7], []],
                "loss_masks": [[1, 1, 0], []],
                "rewards": [0, 0],
                "rollout_logprobs": None,
            },
            "'response_ids', row 1, must have one token or more",
        ),
        ({"rewards": 1.0}, "'rewards' must be a list with an entry per row, but it is 1.0"),
        ({"rollout_expert_indices": [[[[1]]] * 5, [[[7e4]]] * 3]}, "row 1, must be the numbers of experts, or -1"),
        ({"rollout_expert_indices": [[[[1]]] * 5, [[[70000]]] * 3]}, "row 1, must be the numbers of experts, or -1"),
        ({"rollout_metrics": {"calls": float("nan")}}, r"rollout_metrics\['calls'\] must be one finite number"),
        ({"rollout_metrics": {"calls": {"search": 1}}}, r"rollout_metrics\['calls'\] must be one finite number"),
    ],
)
def test_what_is_wrong_with_columns_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_columns(LITERAL | change)


def test_hostile_columns_end_in_samples_or_in_one_clear_error(how_many):
    ended = Counter[str]()
    for columns in islice(cases(random.Random(0)), how_many(500)):
        try:
            audit(from_columns(columns))
            ended["samples"] += 1
        except ValueError as error:
            ended[type(error).__name__] += 1
    assert set(ended) == {"samples", "ValueError", "AuditError"}


def test_lists_of_numbers_are_read_at_once_as_entry_by_entry(monkeypatch, how_many):
    """Also those that mix kinds, sizes and signs, with the same samples and the same errors."""

    def outcome(columns) -> str:
        try:
            return repr([vars(sample) for sample in from_columns(columns)])
        except ValueError as error:
            return re.sub(" at 0x[0-9a-f]+", "", str(error))

    edges = [[2**63, 1], [-(2**63), 0.5], [2**53 + 1, 1.0], [np.longdouble(1), True], [np.float16(2), 3], [], (0.5, 1)]
    lists = [LITERAL | {"rollout_logprobs": [each, [0, 0]]} for each in edges]
    lists += [
        LITERAL | {"policy_versions": [[*each, 1][:3], (-1.0, 2)], "rewards": [[*each, 1][:3], 1]} for each in edges
    ]
    lists += islice(cases(random.Random(1)), how_many(500))
    at_once = [outcome(copy.deepcopy(columns)) for columns in lists]
    monkeypatch.setattr("vlmrl.samples.columns._as_array", lambda values: None)
    assert at_once == [outcome(columns) for columns in lists]
    assert sum(each.startswith("[{") for each in at_once) > 50
