"""Trajectories and settings as JSON."""

import json
import math

import numpy as np
from testing.trajectories import IMAGE, trajectory, turn

from vlmrl.report.records import messages_text, plain, trajectory_record
from vlmrl.types import PointSet, ReceivedRequest, Task


def test_plain_keeps_json_values_and_converts_the_rest():
    assert plain({1: (True, None, np.float32(0.5), math.nan)}) == {"1": [True, None, 0.5, "nan"]}


def test_a_trajectory_record_by_hand():
    prompt = [
        {"role": "user", "content": [{"type": "image", "image": IMAGE.image}, {"type": "text", "text": "Which?"}]}
    ]
    turns = [
        turn(None, {"iou": math.nan}, [IMAGE], messages=prompt),
        turn(1.0, messages=[{"role": "user", "content": "On."}]),
    ]
    record = trajectory_record(trajectory(turns, task=Task("t", prompt, answer={"x": np.int64(3)}, source="zoom")))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    first, second = record.pop("turns")
    assert first.pop("state") != second["state"]
    assert record == {
        "step": None,
        "kind": "train",
        "id": "t#0",
        "group_id": "t",
        "task_id": "t",
        "source": "zoom",
        "prompt": "[image]\nWhich?",
        "answer": {"x": 3},
        "reward": 1.0,
        "final_reward": None,
        "group_reward": None,
        "ending": "env_done",
        "error": None,
        "metrics": {},
    }
    assert first == {
        "observation": None,
        "messages": [{"role": "user", "parts": [{"image": "c0ffee"}, {"text": "Which?"}]}],
        "images": ["c0ffee"],
        "text": "ok",
        "reward": None,
        "metrics": {"iou": "nan"},
        "points": [],
        "stop_reason": "stop",
        "prompt_tokens": 3,
        "sampled_tokens": 2,
        "mean_logprob": -1.0,
        "policy_versions": [4],
        "repetition": 0.0,
        "engine_seconds": 0.0,
        "env_seconds": 0.0,
        "logprob_mismatch": None,
    }
    assert (second["observation"], second["images"]) == ("On.", [])


def test_an_agents_turn_has_the_number_of_the_response_that_its_request_continues():
    turns = [turn(None, {}), turn(None, {}), turn(1.0, {})]
    turns[1].received, turns[2].received = ReceivedRequest((), 0), ReceivedRequest((), None)
    records = trajectory_record(trajectory(turns))["turns"]
    assert [record.get("continues", "absent") for record in records] == ["absent", 0, None]


def test_a_turn_of_an_episode_with_branches_has_what_it_keeps():
    turns = [turn(None, {}), turn(None, {}), turn(1.0, {})]
    turns[1].parent, turns[1].kept = 0, turns[0].length  # goes on
    turns[2].parent, turns[2].kept = 1, turns[1].length - 1  # as `inline` does
    assert all("kept_tokens" not in record for record in trajectory_record(trajectory(turns))["turns"])
    turns[1].asked, turns[2].kept = True, 1
    records = trajectory_record(trajectory(turns))["turns"]
    assert [record["asked"] for record in records] == [False, True, False]
    kept = [(record["parent"], record["kept_tokens"], record["kept_images"]) for record in records]
    assert kept == [(None, 0, 0), (0, turns[0].length, 0), (1, 1, 0)]


def test_turns_that_began_in_one_state_have_one_name_for_it():
    turns = [turn(None, {}), turn(None, {}), turn(1.0, {})]
    turns[0].next_state = turns[1].next_state = "5"
    states = [record["state"] for record in trajectory_record(trajectory(turns))["turns"]]
    assert states[1] == states[2] != states[0]


def test_a_trajectory_without_turns_has_a_record():
    record = trajectory_record(trajectory([], "error", error="engine refused"))
    assert (record["prompt"], record["turns"], record["reward"]) == ("2+2?", [], None)


def test_messages_text_shows_images_and_survives_empty_content():
    parts = [{"type": "image", "image": None}, {"type": "text", "text": "a"}]
    assert (
        messages_text([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "[image]\na\n\n"
    )


def test_points_are_plain_numbers():
    acted = turn()
    acted.points = [PointSet("drag", ((0.25, 0.5), (1.0, 0.0)))]
    (record,) = trajectory_record(trajectory([acted]))["turns"]
    assert record["points"] == [{"label": "drag", "at": [[0.25, 0.5], [1.0, 0.0]]}]
