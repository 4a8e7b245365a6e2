"""The results of a recipe: the curve over seeds, the table of runs, where the numbers come from."""

from typing import Any

import pytest
from PIL import Image

from vlmrl.report.estimators import Estimate
from vlmrl.report.results import RunResult, draw_curves, held_out_curve, results_markdown


def estimate(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}


def result(title: str, rewards: list[float], control: bool = False, blanked: bool = False) -> RunResult:
    """A run whose held-out rewards at steps 0, 10, 20, ... are ``rewards``, with two training steps of 45 s."""
    rows: list[dict[str, Any]]
    rows = [{"step": 10 * n, "eval/reward/mean": r, "eval/standard_error": 0.1} for n, r in enumerate(rewards)]
    rows += [{"step": step, "reward/mean": 0.5, "time/rollout": 40.0, "time/train": 5.0} for step in (1, 2)]
    scores = {"tasks": 4, "reward": estimate(rewards[-1]), "pass_at": {"1": estimate(0.5), "2": estimate(0.75)}}
    results = [{"blanked": False, "scores": scores}]
    if blanked:
        results.append({"blanked": True, "scores": {**scores, "reward": estimate(0.25)}})
    machine = {"cpu": "a CPU", "cores": 2, "threads": 1, "gpus": []}
    evaluation = {"results": results, "versions": {"vlmrl": "0.1.0"}, "machine": machine, "commit": "abc1234"}
    return RunResult(title, control, rows, evaluation)


def test_the_curve_of_several_seeds_has_their_mean_and_range():
    seeds = [result("seed 0", [0.2, 0.5, 0.9]), result("seed 1", [0.4, 0.7])]
    assert held_out_curve(seeds) == {  # step 20 is not known of both
        0: Estimate(pytest.approx(0.3), 0.2, 0.4),
        10: Estimate(pytest.approx(0.6), 0.5, 0.7),
    }


def test_the_curve_of_one_seed_has_its_interval():
    assert held_out_curve([result("seed 0", [0.5])]) == {
        0: Estimate(0.5, pytest.approx(0.304, abs=1e-4), pytest.approx(0.696, abs=1e-4))
    }


def test_the_page_shows_seeds_controls_curves_and_origin():
    results = [
        result("seed 0", [0.2, 0.8], blanked=True),
        result("seed 1", [0.4, 0.9], blanked=True),
        result("shuffled rewards, seed 0", [0.2, 0.1], control=True),
    ]
    lines = results_markdown("say", "vlmrl reproduce say.py", results, "a.png", "2030-01-02").splitlines()
    assert (
        lines[0] == "### say"
        and "vlmrl reproduce say.py" in lines
        and "![Reward over the steps of say](a.png)" in lines
    )
    start = lines.index("| held-out reward | before RL | after RL | pass@2 | images blanked | training |")
    assert lines[start + 3 : start + 6] == [
        "| seed 1 | 0.400 (0.204 to 0.596) | 0.900 (0.850 to 0.950) | 0.750 (0.700 to 0.800) | 0.250 (0.200 to 0.300) | 1.5 min |",
        "| **mean of the seeds** | **0.300** | **0.850** | **0.750** | **0.250** | 1.5 min |",
        "| shuffled rewards, seed 0 | 0.200 (0.004 to 0.396) | 0.100 (0.050 to 0.150) | 0.750 (0.700 to 0.800) |  | 1.5 min |",
    ]
    assert "2030-01-02, commit abc1234; vlmrl 0.1.0; a CPU, 2 cores, torch threads: 1, no GPU." in lines[-1]


def test_the_curves_of_seeds_and_controls_are_drawn(tmp_path):
    results = [result("seed 0", [0.2, 0.8]), result("seed 1", [0.4]), result("shuffled", [0.2, 0.1], control=True)]
    draw_curves(results, tmp_path / "a/curve.png", title="say", chance=0.25)
    assert Image.open(tmp_path / "a/curve.png").size == (880, 495)
