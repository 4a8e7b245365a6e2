"""Metrics of trajectories, computed by hand."""

import pytest
from testing.fakes import make_trajectory, make_turn
from testing.trajectories import IMAGE, trajectory, turn

from vlmrl.report.metrics import repetition, trajectory_metrics
from vlmrl.types import Task


def test_trajectory_metrics_by_hand():
    good = trajectory([turn(0.5, {"hit": 1.0}, [IMAGE]), turn(0.5, {"hit": 0.0, "iou": 0.5}, [IMAGE])])
    bad = trajectory([turn(0.0, response_ids=[7])], "length", metrics={"env_timeouts": 2.0})
    failed = trajectory([turn(9.0, {"hit": 9.0}, [IMAGE] * 9)], "error", error="boom", metrics={"env_timeouts": 4.0})
    result = trajectory_metrics([good, bad, failed])
    endings = {key: value for key, value in result.items() if key.startswith("ending/")}
    of_turns = {key: result.pop(key) for key in list(result) if key.startswith("turn/")}
    assert of_turns["turn/sampled_tokens/mean"] == pytest.approx(5 / 3) and of_turns["turn/sampled_tokens/max"] == 2.0
    assert of_turns["turn/new_prompt_tokens/mean"] == 3.0
    assert of_turns["turn/with_images"] == 1.0  # of one turn after a first
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


def test_numbers_that_responses_wrote_have_a_mean_however_large_they_are():
    played = [make_trajectory(name, [make_turn([1], [5], [-0.1])], final_reward=1.0) for name in "ab"]
    for each in played:
        each.turns[0].metrics = {"guess": 1.5e308}
    assert trajectory_metrics(played)["env/guess"] == 1.5e308


def test_repetition_counts_four_grams_that_occurred_before():
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1] * 7) == 0.75
    assert repetition([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)  # five runs, the last of which is the first
    assert repetition([1, 1, 1]) == 0.0


def test_unknown_values_are_left_out():
    none = dict.fromkeys(("retries/env_errors", "retries/env_timeouts", "retries/turns_resampled"), 0.0)
    assert trajectory_metrics([]) == {"trajectories": 0.0, "failed": 0.0} | none
    result = trajectory_metrics([trajectory([turn(1.0)], "aborted")])
    assert result["failed"] == 1.0 and not any(key.startswith(("reward", "turns")) for key in result)


def test_several_sources_and_mixtures_have_metrics_of_their_own():
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
