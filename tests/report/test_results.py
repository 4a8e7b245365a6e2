"""The results of a recipe: the table of runs, and where the numbers come from."""

from typing import Any

from vlmrl.report.results import RunResult, results_markdown


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


def test_the_page_shows_seeds_controls_and_origin():
    results = [
        result("seed 0", [0.2, 0.8], blanked=True),
        result("seed 1", [0.4, 0.9], blanked=True),
        result("shuffled rewards, seed 0", [0.2, 0.1], control=True),
    ]
    lines = results_markdown("say", "vlmrl reproduce say.py", results, "2030-01-02").splitlines()
    assert lines[0] == "### say" and "vlmrl reproduce say.py" in lines
    start = lines.index("| held-out reward | before RL | after RL | pass@2 | images blanked | training |")
    assert lines[start + 3 : start + 6] == [
        "| seed 1 | 0.400 (0.204 to 0.596) | 0.900 (0.850 to 0.950) | 0.750 (0.700 to 0.800) | 0.250 (0.200 to 0.300) | 1.5 min |",
        "| **mean of the seeds** | **0.300** | **0.850** | **0.750** | **0.250** | 1.5 min |",
        "| shuffled rewards, seed 0 | 0.200 (0.004 to 0.396) | 0.100 (0.050 to 0.150) | 0.750 (0.700 to 0.800) |  | 1.5 min |",
    ]
    assert "2030-01-02, commit abc1234; vlmrl 0.1.0; a CPU, 2 cores, torch threads: 1, no GPU." in lines[-1]
