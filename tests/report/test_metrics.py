import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlmrl.report.metrics import (
    RunLog,
    draw_curve,
    messages_text,
    plain,
    read_rows,
    repetition,
    smooth,
    trajectory_metrics,
    trajectory_record,
)
from vlmrl.types import MediaItem, Task, Trajectory, Turn

IMAGE = MediaItem("c0ffee", Image.new("RGB", (8, 8), "red"), {}, 4)


def turn(reward=None, metrics=None, media=(), response_ids=(7, 8), messages=()):
    ids, logprobs = list(response_ids), [-0.5, -1.5][: len(response_ids)]
    return Turn(
        [1, 2, 3], list(media), ids, logprobs, [4] * len(ids), "stop", "ok", list(messages), reward, metrics or {}
    )


def trajectory(turns, ending="env_done", task=None, **more):
    return Trajectory(
        "t#0", "t", task or Task("t", [{"role": "user", "content": "2+2?"}], answer="4"), turns, ending, **more
    )


def test_rows_are_one_json_object_a_line_with_step_and_time(tmp_path):
    with RunLog(tmp_path / "run") as log:
        log.log(1, {"reward/mean": 0.25, "kl": None, "note": "warm"})
        log.log(2, {"tokens": np.int64(3), "loss": np.float32(0.5)})
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()  # already there: every row is flushed
    first, second = map(json.loads, lines)
    assert first.pop("time") > 1.7e9
    assert first == {"step": 1, "reward/mean": 0.25, "kl": None, "note": "warm"}
    assert (second["tokens"], second["loss"]) == (3, 0.5)


@pytest.mark.parametrize("value", [{"a": 1}, [1.0], (1,), math.nan, math.inf, np.zeros(2), object()])
def test_a_value_that_is_no_finite_number_is_an_error_naming_the_key(tmp_path, value):
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match="'loss/parts'"):
        log.log(1, {"fine": 1.0, "loss/parts": value})
    assert log.rows() == []


def test_a_metric_cannot_take_the_name_of_the_step(tmp_path):
    with pytest.raises(ValueError, match="'step'"):
        RunLog(tmp_path).log(1, {"step": 2})


def test_a_resumed_run_goes_on_at_the_checkpoints_place(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {"a": 1})
        log.log_trajectories(1, [trajectory([turn(1.0)])])
        place = log.place()
        log.log(2, {"a": 2})
        log.log_trajectories(2, [trajectory([turn(1.0)])])
    with RunLog(tmp_path, place) as log:
        log.log(2, {"a": 20})
        assert [(row["step"], row["a"]) for row in log.rows()] == [(1, 1), (2, 20)]
    assert [row["step"] for row in read_rows(tmp_path / "trajectories.jsonl")] == [1]


def test_a_folder_with_a_run_in_it_is_refused_unless_resumed_or_started_over(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {})
    with pytest.raises(ValueError, match="holds a run already"):
        RunLog(tmp_path)
    assert RunLog(tmp_path, place={}).rows() == []


def test_a_place_behind_the_files_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"metrics.jsonl: it has 0 bytes and the checkpoint was made at byte 9"):
        RunLog(tmp_path, {"metrics.jsonl": 9})


def test_a_line_cut_short_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_rows(tmp_path / "none.jsonl") == []


def test_the_config_is_written_in_plain_json(tmp_path):
    @dataclass(frozen=True)
    class Optim:
        lr: float = 1e-6
        clip: float = math.inf

    @dataclass(frozen=True)
    class Config:
        out: Path = Path("runs/x")
        env: type = Task
        stops: frozenset[str] = frozenset({"b", "a"})
        optim: Optim = field(default_factory=Optim)

    RunLog(tmp_path).write_config(Config())
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "out": "runs/x",
        "env": "vlmrl.types:Task",
        "stops": ["a", "b"],
        "optim": {"lr": 1e-6, "clip": "inf"},
    }


def test_plain_keeps_json_and_names_the_rest():
    assert plain({1: (True, None, np.float32(0.5), math.nan)}) == {"1": [True, None, 0.5, "nan"]}


def test_trajectory_metrics_by_hand():
    good = trajectory([turn(0.5, {"hit": 1.0}, [IMAGE]), turn(0.5, {"hit": 0.0, "iou": 0.5}, [IMAGE])])
    bad = trajectory([turn(0.0, response_ids=[7])], "length", metrics={"env_timeouts": 2.0})
    failed = trajectory([turn(9.0, {"hit": 9.0}, [IMAGE] * 9)], "error", error="boom", metrics={"env_timeouts": 4.0})
    result = trajectory_metrics([good, bad, failed])
    endings = {key: value for key, value in result.items() if key.startswith("ending/")}
    of_turns = {key: result.pop(key) for key in list(result) if key.startswith("turn/")}
    assert of_turns["turn/sampled_tokens/mean"] == pytest.approx(5 / 3) and of_turns["turn/sampled_tokens/max"] == 2.0
    assert of_turns["turn/new_prompt_tokens/mean"] == 3.0
    assert of_turns["turn/repetition/max"] == of_turns["turn/env_seconds/max"] == 0.0
    assert endings == {
        "ending/env_done": 1 / 3,
        "ending/max_turns": 0.0,
        "ending/max_tokens": 0.0,
        "ending/length": 1 / 3,
        "ending/aborted": 0.0,
        "ending/error": 1 / 3,
    }
    assert {key: value for key, value in result.items() if key not in endings} == {
        "trajectories": 3.0,
        "failed": 1.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "truncated": 1 / 3,
        "turns/mean": 1.5,
        "turns/max": 2.0,
        "sampled_tokens/mean": 2.5,
        "sampled_tokens/max": 4.0,
        "images/mean": 1.0,
        "env/hit": 0.5,
        "env/iou": 0.5,
        "retries/env_errors": 0.0,
        "retries/env_timeouts": 6.0,
        "retries/turns_resampled": 0.0,
        "trajectory/env_timeouts": 3.0,
    }


def test_repetition_counts_runs_of_four_tokens_that_came_before():
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1] * 7) == 0.75
    assert repetition([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)  # five runs, the last of which is the first
    assert repetition([1, 1, 1]) == 0.0


def test_what_is_not_known_is_left_out():
    none = dict.fromkeys(("retries/env_errors", "retries/env_timeouts", "retries/turns_resampled"), 0.0)
    assert trajectory_metrics([]) == {"trajectories": 0.0, "failed": 0.0} | none
    result = trajectory_metrics([trajectory([turn(1.0)], "aborted")])
    assert result["failed"] == 1.0 and not any(key.startswith(("reward", "turns")) for key in result)


def test_sources_are_told_apart_where_there_are_several_or_a_mixture():
    def of(source, reward, turns=1, part="", **fields):
        return trajectory([turn(reward / turns)] * turns, task=Task("t", [], source=source, part=part), **fields)

    several = trajectory_metrics([of("geo", 1.0, 2), of("geo", 0.0), of("zoom", 1.0), of("zoom", 0.0, ending="error")])
    assert {key: value for key, value in several.items() if key.startswith("source/")} == {
        "source/geo/trajectories": 2.0,
        "source/geo/reward/mean": 0.5,
        "source/geo/turns/mean": 1.5,
        "source/zoom/trajectories": 1.0,
        "source/zoom/reward/mean": 1.0,
        "source/zoom/turns/mean": 1.0,
    }
    assert not any(key.startswith("source/") for key in trajectory_metrics([of("data/a.jsonl", 1.0)]))
    assert trajectory_metrics([of("geo", 1.0, part="geo")])["source/geo/reward/mean"] == 1.0


def test_a_trajectory_record_is_json_and_says_what_happened():
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
        "images": ["c0ffee"],
        "text": "ok",
        "reward": None,
        "metrics": {"iou": "nan"},
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


def test_a_trajectory_without_turns_has_a_record():
    record = trajectory_record(trajectory([], "error", error="engine refused"))
    assert (record["prompt"], record["turns"], record["reward"]) == ("2+2?", [], None)


def test_messages_text_shows_images_and_survives_empty_content():
    parts = [{"type": "image", "image": None}, {"type": "text", "text": "a"}]
    assert (
        messages_text([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "[image]\na\n\n"
    )


def test_smoothing_keeps_a_constant_and_the_middle_of_a_line():
    assert smooth([2.0] * 9) == pytest.approx([2.0] * 9)
    assert smooth([float(n) for n in range(41)])[20] == pytest.approx(20.0)
    assert smooth([3.0]) == [3.0]


@pytest.mark.parametrize("steps", [1, 3, 30])
def test_a_curve_is_drawn(tmp_path, steps):
    rows = [{"step": s, "reward/mean": s / steps} for s in range(steps)] + [{"step": 0, "eval/reward/mean": 0.5}]
    draw_curve(rows, tmp_path / "a/curve.png", title="zoom", levels={"chance": 0.1})
    assert Image.open(tmp_path / "a/curve.png").size == (1280, 720)


def test_a_curve_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="none of the 1 has a 'reward/mean'"):
        draw_curve([{"step": 1, "reward/mean": None}], tmp_path / "curve.png")
