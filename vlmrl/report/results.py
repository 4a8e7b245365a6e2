"""The results of a recipe over seeds and controls, as a table of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vlmrl.report.estimators import Estimate, normal_interval


@dataclass(frozen=True)
class RunResult:
    """What one training run and the evaluation of its model gave."""

    title: str
    """``seed 0``, or ``shuffled rewards, seed 0``."""
    control: bool
    rows: list[dict[str, Any]]
    """Those of ``metrics.jsonl``."""
    evaluation: dict[str, Any]
    """The results of ``vlmrl eval`` on the trained model, in their JSON form."""

    @property
    def minutes(self) -> float:
        """Of rollouts and training, without evaluations."""
        return sum(row.get(f"time/{part}") or 0.0 for row in self.rows for part in ("rollout", "train")) / 60

    def estimates(self) -> dict[str, Estimate]:
        """The columns of the table: the held-out reward before and after RL, pass@k, and the reward with images blanked."""
        found: dict[str, Estimate] = {}
        if (first := next((row for row in self.rows if "eval/reward/mean" in row), None)) is not None:
            found["before RL"] = normal_interval(first["eval/reward/mean"], first["eval/standard_error"])
        for row in self.evaluation["results"]:
            scores = row["scores"]
            found["images blanked" if row["blanked"] else "after RL"] = Estimate(**scores["reward"])
            if not row["blanked"]:
                found |= {f"pass@{k}": Estimate(**each) for k, each in scores["pass_at"].items() if k != "1"}
        return found


def results_markdown(title: str, command: str, results: Sequence[RunResult], date: str) -> str:
    """The command, the table of runs, and where the numbers come from."""
    return "\n\n".join([f"### {title}", f"```\n{command}\n```", _runs_table(results), _origin(results, date)]) + "\n"


def _runs_table(results: Sequence[RunResult]) -> str:
    """A line for each run, and of several seeds their mean."""
    estimates = [result.estimates() for result in results]
    names = list(dict.fromkeys(name for each in estimates for name in each))
    lines = [
        [result.title, *(_interval(each.get(name)) for name in names), f"{result.minutes:.1f} min"]
        for result, each in zip(results, estimates, strict=True)
    ]
    seeds = [number for number, result in enumerate(results) if not result.control]
    if len(seeds) > 1:
        means = [fmean(estimates[n][name].mean for n in seeds if name in estimates[n]) for name in names]
        time = fmean(results[n].minutes for n in seeds)
        lines.insert(len(seeds), ["**mean of the seeds**", *(f"**{mean:.3f}**" for mean in means), f"{time:.1f} min"])
    rows = [["held-out reward", *names, "training"], ["---"] * (len(names) + 2), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _interval(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _origin(results: Sequence[RunResult], date: str) -> str:
    commits = list(dict.fromkeys(result.evaluation["commit"] or "no repository" for result in results))
    evaluation = results[0].evaluation
    versions = ", ".join(f"{name} {number}" for name, number in evaluation["versions"].items())
    machine = evaluation["machine"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    tasks = evaluation["results"][0]["scores"]["tasks"]
    return (
        f"{date}, commit {', '.join(commits)}; {versions}; {machine['cpu']}, {machine['cores']} cores, torch threads: "
        f"{machine['threads']}, {gpus}. Intervals are of 95% over {tasks} held-out tasks: before RL from the standard error, after RL "
        "by bootstrap. The saved model was evaluated on episodes of its own."
    )
