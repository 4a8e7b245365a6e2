"""The results of a recipe over seeds and controls: a table of its runs, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vlmrl.report.curve import HELD_OUT, MUTED, TRAIN, curve_points, draw_level, smooth, style_axes
from vlmrl.report.estimators import Estimate, normal_interval
from vlmrl.utils.output_files import whole_file


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
        found = dict(zip(["before RL"], held_out_curve([self]).values(), strict=False))
        for row in self.evaluation["results"]:
            scores = row["scores"]
            found["images blanked" if row["blanked"] else "after RL"] = Estimate(**scores["reward"])
            if not row["blanked"]:
                found |= {f"pass@{k}": Estimate(**each) for k, each in scores["pass_at"].items() if k != "1"}
        return found


def held_out_curve(results: Sequence[RunResult]) -> dict[int, Estimate]:
    """The held-out reward at the steps that all ``results`` have.

    Of several runs the mean, the lowest and the highest; of one its 95% interval over tasks.
    """
    curves = [{row["step"]: row for row in result.rows if "eval/reward/mean" in row} for result in results]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(curves) == 1:
        return {
            step: normal_interval(curves[0][step]["eval/reward/mean"], curves[0][step]["eval/standard_error"])
            for step in steps
        }
    means = {step: [curve[step]["eval/reward/mean"] for curve in curves] for step in steps}
    return {step: Estimate(fmean(values), min(values), max(values)) for step, values in means.items()}


def draw_curves(results: Sequence[RunResult], path: Path, *, title: str, chance: float | None = None) -> None:
    """Draw each seed's training reward, smoothed, the held-out reward with its interval, and that of the controls, as a PNG.

    ``chance`` is a dashed line: the reward of guessing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="tight", facecolor="white")
    axes = figure.add_subplot()
    seeds, controls = [r for r in results if not r.control], [r for r in results if r.control]
    for number, result in enumerate(seeds):
        steps, rewards = curve_points(result.rows, "reward/mean")
        label = "training, each seed" if number == 0 else None
        axes.plot(steps, smooth(rewards) if rewards else [], color=TRAIN, linewidth=1.2, alpha=0.6, label=label)
    for members, label, color in ((seeds, "held out", HELD_OUT), (controls, "control, held out", MUTED)):
        if curve := held_out_curve(members):
            points = list(curve.values())
            low, high = [point.low for point in points], [point.high for point in points]
            axes.fill_between(list(curve), low, high, color=color, alpha=0.18, linewidth=0)
            means = [point.mean for point in points]
            axes.plot(list(curve), means, color=color, marker="o", markersize=5, linewidth=1.5, label=label, zorder=4)
    if chance is not None:
        draw_level(axes, "guessing", chance)
    style_axes(axes, title, "reward")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part, format="png")


def results_markdown(title: str, command: str, results: Sequence[RunResult], figure: str, date: str) -> str:
    """The command, the table of runs, the curves, and where the numbers come from. ``figure``: the file with the curves."""
    curves = f"![Reward over the steps of {title}]({figure})"
    parts = [f"### {title}", f"```\n{command}\n```", _runs_table(results), curves, _origin(results, date)]
    return "\n\n".join(parts) + "\n"


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
        "by bootstrap. The saved model was evaluated on episodes of its own, not on those of the curve."
    )
