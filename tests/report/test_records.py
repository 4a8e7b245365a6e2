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
