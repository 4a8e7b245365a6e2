"""The report of an evaluation: rows of scores with intervals as JSON types, and as tables on the console.

One row is one model with the images as they are or blanked. Differences are paired over the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vlmrl.report.estimators import LEVEL, RESAMPLES, Estimate, bootstrap, paired_difference
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.records import plain
from vlmrl.run.evaluate import Evaluation, LeftOut, TaskRewards
from vlmrl.types import Trajectory
from vlmrl.utils.terminal import RunTerminal

FORMAT = 1
"""The version of the JSON form."""


@dataclass(frozen=True)
class Scores:
    """The estimates over some tasks: all of them, or those of one source."""

    tasks: int
    reward: Estimate
    standard_error: float
    pass_at: dict[str, Estimate]
    """By k: ``{"1": ..., "2": ...}``."""


def row_name(model: str, blanked: bool) -> str:
    return f"{model} (images blanked)" if blanked else model


@dataclass(frozen=True)
class EvalRow:
    """One model's result, with its images as they are or blanked."""

    model: str
    blanked: bool
    scores: Scores
    sources: dict[str, Scores]
    """By source. Empty if all tasks are of one."""
    left_out: LeftOut
    """How many tasks are in none of the estimates, by reason."""
    trajectories: int
    failed: int
    """Trajectories that failed, played again or not. None of them has a reward."""
    endings: dict[str, float]
    """The fraction of trajectories by ending."""
    turns: float
    """Mean turns of a trajectory."""
    sampled_tokens: dict[str, float]
    """Tokens of a trajectory's responses: ``mean`` and ``max``. Those of an API's model are counted by the API."""
    seconds: float
    task_rewards: dict[str, list[float]] = field(repr=False)
    """The rewards of each task's trajectories, by the task's id."""

    @property
    def name(self) -> str:
        return row_name(self.model, self.blanked)

    @property
    def means(self) -> dict[str, float]:
        """The mean reward of each task."""
        return {task: fmean(rewards) for task, rewards in self.task_rewards.items()}

    @classmethod
    def of(cls, model: str, evaluation: Evaluation, *, blanked: bool, seed: int, seconds: float) -> EvalRow:
        """``seed`` draws the bootstrap's samples."""
        tasks, metrics = evaluation.tasks, trajectory_metrics(evaluation.trajectories)
        sources = sorted({task.source for task in tasks})
        by_source = {source: [task for task in tasks if task.source == source] for source in sources}
        tokens = [_num_sampled(trajectory) for trajectory in evaluation.trajectories]
        endings = {name.removeprefix("ending/"): value for name, value in metrics.items() if name.startswith("ending/")}
        return cls(
            model=model,
            blanked=blanked,
            scores=_scores(tasks, evaluation, seed),
            sources={name: _scores(part, evaluation, seed) for name, part in by_source.items()} if sources[1:] else {},
            left_out=evaluation.left_out,
            trajectories=len(evaluation.trajectories),
            failed=len(evaluation.failed),
            endings={name: fraction for name, fraction in endings.items() if fraction},
            turns=metrics["turns/mean"],
            sampled_tokens={"mean": fmean(tokens), "max": max(tokens)},
            seconds=round(seconds, 1),
            task_rewards={task.id: task.rewards for task in tasks},
        )


@dataclass(frozen=True)
class Difference:
    """The mean reward of ``model`` minus that of ``baseline``, over the tasks that both have."""

    model: str
    baseline: str
    tasks: int
    reward: Estimate


def differences(rows: Sequence[EvalRow], seed: int) -> list[Difference]:
    """Each model against the first one, and each row with blanked images against the same model's with images."""
    plain_rows = [row for row in rows if not row.blanked]
    pairs = [(row, plain_rows[0]) for row in plain_rows[1:]]
    pairs += [(row, other) for row in rows if row.blanked for other in plain_rows if other.model == row.model]
    result = []
    for row, baseline in pairs:
        shared = row.means.keys() & baseline.means.keys()
        if shared:
            difference = paired_difference(row.means, baseline.means, seed)
            result.append(Difference(row.name, baseline.name, len(shared), difference))
    return result


def eval_document(
    rows: Sequence[EvalRow], seed: int, origin: dict[str, Any], settings: Any, missing: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON form: ``origin`` is :func:`~vlmrl.report.provenance.provenance`, ``settings`` the resolved config.

    ``missing``: the names of the rows that an error or a stop prevented.
    """
    return {
        "format": FORMAT,
        **origin,
        "interval": {"level": LEVEL, "method": "percentile bootstrap over tasks", "resamples": RESAMPLES, "seed": seed},
        "results": [plain(row) for row in rows],
        "not_evaluated": list(missing),
        "differences": [plain(each) for each in differences(rows, seed)],
        "settings": plain(settings),
    }


def print_report(console: Console, rows: Sequence[EvalRow], seed: int) -> None:
    """Print the tables: scores, episodes, sources, differences. Outside a terminal they are 120 columns wide."""
    wide = RunTerminal(
        file=console.file,
        width=None if console.is_terminal else max(console.width, 120),
        highlight=False,
        markup=False,
    )
    wide.print(_scores_table({row.name: row.scores for row in rows}, "held-out tasks"))
    wide.print(_episodes_table(rows))
    by_source = {f"{row.name}: {source}": scores for row in rows for source, scores in row.sources.items()}
    if by_source:
        wide.print(_scores_table(by_source, "by source"))
    if compared := differences(rows, seed):
        wide.print(_differences_table(compared))


def _num_sampled(trajectory: Trajectory) -> float:
    return sum(turn.metrics.get("api_response_tokens", len(turn.response_ids)) for turn in trajectory.turns)


def _scores(tasks: Sequence[TaskRewards], evaluation: Evaluation, seed: int) -> Scores:
    means = [task.mean for task in tasks]
    part = Evaluation(list(tasks), evaluation.solved, evaluation.left_out, [])
    passed = {str(k): bootstrap([task.pass_at(k, evaluation.solved) for task in tasks], seed) for k in part.ks}
    return Scores(len(tasks), bootstrap(means, seed), part.standard_error, passed)


def _scores_table(scores: dict[str, Scores], title: str) -> Table:
    ks = list(next(iter(scores.values())).pass_at)
    table = _table(
        f"{title}: mean and {LEVEL:.0%} interval over tasks", ["reward", *(f"pass@{k}" for k in ks), "tasks"]
    )
    for name, each in scores.items():
        estimates = [each.reward, *(each.pass_at[k] for k in ks)]
        table.add_row(name, *(f"{e.mean:.3f}\n{e.low:.3f} to {e.high:.3f}" for e in estimates), str(each.tasks))
    return table


def _episodes_table(rows: Sequence[EvalRow]) -> Table:
    table = _table("episodes", ["trajectories", "failed", "tasks left out", "turns", "tokens"])
    table.add_column("endings")
    for row in rows:
        counts = [row.trajectories, row.failed, row.left_out.total]
        means = [f"{row.turns:.2f}", f"{row.sampled_tokens['mean']:.1f}"]
        endings = ", ".join(f"{name} {fraction:.0%}" for name, fraction in row.endings.items())
        table.add_row(row.name, *map(str, counts), *means, endings)
    left_out = [f"{row.name}: {row.left_out}" for row in rows if row.left_out.total]
    table.caption = "\n".join(left_out) or None
    return table


def _differences_table(compared: Sequence[Difference]) -> Table:
    table = _table(f"reward minus another's, paired over the same tasks: mean and {LEVEL:.0%} interval", [])
    table.add_column("minus", overflow="fold")
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("tasks", justify="right", no_wrap=True)
    for each in compared:
        mean, low, high = each.reward.mean, each.reward.low, each.reward.high
        table.add_row(each.model, each.baseline, f"{mean:+.3f}\n{low:+.3f} to {high:+.3f}", str(each.tasks))
    return table


def _table(title: str, numbers: Sequence[str]) -> Table:
    """An empty table with a column of models and columns of numbers."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("model", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
