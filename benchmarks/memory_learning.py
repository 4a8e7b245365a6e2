"""What memory is worth: the task of recipes/memory_tiny.py with summaries, trained or not, with a window, and without memory.

    python benchmarks/memory_learning.py                                    # all runs, some minutes each on one core
    python benchmarks/memory_learning.py --memories compact --seeds 0       # one of them
    python benchmarks/memory_learning.py --memories --draw-to assets/memory.png  # only the table and the curves of the finished ones

One color is asked for after it has left a window of as many responses as there are between two summaries. `masked` are summaries whose
tokens have advantage 0: the policy learns to use what it wrote, not what to write. Prints held-out rewards, and tokens of an episode.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import tyro

from vlmrl import Config, Model, WarmStart
from vlmrl.algos.turn_credit import Compare
from vlmrl.config.code import load_object
from vlmrl.report.curve import draw_level, style_axes
from vlmrl.report.estimators import Estimate
from vlmrl.report.json_lines import JsonLinesTail
from vlmrl.report.progress import RunProgress
from vlmrl.report.results import RunResult
from vlmrl.run.build import build_run
from vlmrl.run.program import run_training
from vlmrl.run.sft import fine_tune

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/memory_tiny.py"
SHOWN = {"shown": 2, "asked": 1}  # of the recipe's four things and two: half of the time
WINDOWS = {"window": 2, "none": 0}  # responses that stay, with the observations after them
TOKENS = {"sampled": "sampled_tokens", "trained": "tokens", "in rows": "row_tokens", "of these shared": "shared_tokens"}
COLORS = {"compact": "#3ca951", "masked": "#efb118", "window": "#4269d0", "none": "#9c6b4e"}
REQUEST = "Which"


def only_responses(
    rewards: Sequence[Sequence[float]], states: Sequence[Sequence[str]], group_ids: Sequence[str], advantage: Compare
) -> list[list[float]]:
    """The trajectory's advantage for each turn but summaries, which begin at the request for them and have 0."""
    totals = advantage(torch.tensor([sum(row) for row in rewards], dtype=torch.float64), group_ids).tolist()
    return [
        [0.0 if f"'{REQUEST}'" in state else total for state in row] for total, row in zip(totals, states, strict=True)
    ]


def teach(folder: Path) -> str:
    """The folder of the recipe's warm-started model, made once: all runs begin with it."""
    model = folder.resolve() / "taught"
    if not (model / "config.json").exists():
        run = build_run(replace(recipe(), name="teach", output_dir=str(folder)))
        asyncio.run(fine_tune(run, "warm_start", RunProgress()))
        run.model.save(model)
        run.engine.close()
    return str(model)


def recipe() -> Config:
    config: Config = load_object(f"{RECIPE}:config")()
    return replace(
        config,
        data=replace(config.data, options=SHOWN),
        rollout=replace(config.rollout, max_turns=SHOWN["shown"] + 2),
        warm_start=replace(config.warm_start, steps=300, trajectories_per_step=16),
        optim=replace(config.optim, lr=3e-4),
        train=replace(config.train, steps=40, groups_per_batch=8),
        eval=replace(config.eval, data=replace(config.eval.data, options=SHOWN), every=20),
    )


def settings(memory: str, seed: int, folder: Path) -> Config:
    config = replace(
        recipe(),
        name=f"{memory}-{seed}",
        output_dir=str(folder),
        model=Model(path=teach(folder)),
        warm_start=WarmStart(),
        seed=seed,
        save_model=False,
    )
    if memory == "masked":
        return replace(config, algo=replace(config.algo, credit=only_responses))
    if memory == "compact":
        return config
    return replace(
        config, rollout=replace(config.rollout, history="last_turns", history_options={"k": WINDOWS[memory]})
    )


def finished(memory: str, folder: Path) -> list[RunResult]:
    """The runs of ``memory`` that have an evaluation after their last step."""
    steps, found = recipe().train.steps, []
    for path in sorted(folder.glob(f"{memory}-[0-9]/metrics.jsonl")):
        rows = [line.value for line in JsonLinesTail(path).lines()]
        if any(row["step"] == steps and "eval/reward/mean" in row for row in rows):
            found.append(RunResult(path.parent.name, False, rows, {}))
    return found


def held_out_curve(runs: Sequence[RunResult]) -> dict[int, Estimate]:
    """The held-out reward at each evaluation's step: its mean over seeds, the lowest and the highest."""
    name = "eval/reward/mean"
    curves = [{row["step"]: row[name] for row in run.rows if name in row} for run in runs]
    values = {step: [curve[step] for curve in curves] for step in curves[0]}
    return {step: Estimate(fmean(each), min(each), max(each)) for step, each in values.items()}


def table(results: dict[str, list[RunResult]]) -> str:
    """The held-out reward at each evaluation, its mean over seeds, the lowest and the highest; and tokens of a trained episode."""
    curves = {memory: held_out_curve(runs) for memory, runs in results.items() if runs}
    steps = sorted(set().union(*curves.values()))
    names = ["memory", "seeds", *(f"step {step}" for step in steps), *TOKENS]
    lines = [names, ["---"] * len(names)]
    for memory, curve in curves.items():
        cells = [f"{each.mean:.3f} ({each.low:.2f} to {each.high:.2f})" for each in curve.values()]
        lines.append([memory, str(len(results[memory])), *cells, *tokens(results[memory])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tokens(runs: Sequence[RunResult]) -> list[str]:
    """The mean tokens of an episode over the steps of all runs."""
    rows = [row for run in runs for row in run.rows if "row_tokens" in row]
    return [f"{fmean(row[name] / row['trajectories'] for row in rows):.1f}" for name in TOKENS.values()]


def draw(results: dict[str, list[RunResult]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="tight", facecolor="white")
    axes = figure.add_subplot()
    for memory, runs in ((memory, runs) for memory, runs in results.items() if runs):
        curve, color = held_out_curve(runs), COLORS[memory]
        low, high = [each.low for each in curve.values()], [each.high for each in curve.values()]
        axes.fill_between(list(curve), low, high, color=color, alpha=0.18, linewidth=0)
        axes.plot(list(curve), [each.mean for each in curve.values()], color=color, marker="o", label=memory)
    draw_level(axes, "guessing", 0.25)
    style_axes(axes, "memory: held-out reward over the seeds", "reward")
    figure.savefig(path)


def main(
    memories: tuple[str, ...] = tuple(COLORS),
    seeds: tuple[int, ...] = (0, 1, 2),
    folder: Path = Path("runs/memory_learning"),
    draw_to: Path | None = None,
) -> None:
    """Runs that are finished in ``folder`` are not repeated. ``draw_to``: a PNG of the curves."""
    for seed in seeds:
        for memory in memories:
            if f"{memory}-{seed}" not in [result.title for result in finished(memory, folder)]:
                run_training(settings(memory, seed, folder))
    results = {memory: finished(memory, folder) for memory in COLORS}
    print(table(results))
    if draw_to is not None:
        draw(results, draw_to)


if __name__ == "__main__":
    tyro.cli(main)
