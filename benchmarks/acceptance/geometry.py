"""20 steps of the whole loop on geometry problems: random weights of the 2B's shape, the embedded engine, full training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from acceptance.mismatch import MEAN
from acceptance.models import parameters_of, random_folder
from acceptance.report import Report, gib, need_dependencies, require, within

HOPPER_FLOPS = 989e12
"""Dense bfloat16 operations per second of an H100 or H200 SXM, from NVIDIA's data sheets."""


def run(report: Report) -> None:
    report.check(f"{steps(report)} steps", lambda: geometry(report))


def steps(report: Report) -> int:
    return 2 if report.tiny else 20


def geometry(report: Report) -> str:
    need_dependencies()
    if not report.tiny:
        report.need_gpu()
    import geometry_recipe

    config = geometry_recipe.config()
    model = replace(config.model, path=f"random:{random_folder(report)}", dtype="bfloat16")
    train, rollout = replace(config.train, steps=steps(report)), config.rollout
    if report.tiny:
        train, rollout = replace(train, groups_per_batch=2), replace(rollout, group_size=4, max_response_tokens=16)
    config = replace(config, model=model, train=train, rollout=rollout, output_dir=str(report.scratch))
    rows = trained(config)
    source = "Geometry3K" if geometry_recipe.problems() else "drawn problems"
    return f"{source}; {summary(report, rows)}"


def trained(config: Any) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    from vlmrl.config.code import resolve_config
    from vlmrl.run.program import run_training

    run_training(resolve_config(config))
    return metrics(config.folder, config.train.steps)


def metrics(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The metrics of each of a run's ``steps``. Raises AssertionError if one is missing or has numbers that are not finite."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    require(len(rows) == steps, f"{len(rows)} of {steps} steps were trained")
    numbers = [row[name] for row in rows for name in ("loss", "grad_norm", "logprob_mismatch/mean")]
    require(all(math.isfinite(number) for number in numbers), "a loss, a gradient norm or a mismatch is not finite")
    return rows


def summary(report: Report, rows: list[dict[str, Any]]) -> str:
    """Means over the steps after the first two, which compile kernels."""
    from vlmrl.plan.gpus import gpu_at_hand

    later = rows[2:] or rows

    def mean(name: str) -> float:
        return sum(row[name] for row in later) / len(later)

    rollout, train = mean("time/rollout"), mean("time/train")
    text = (
        f"reward {rows[0]['reward/mean']:.3f} to {rows[-1]['reward/mean']:.3f}; a step: rollout {rollout:.1f} s "
        f"({mean('sampled_tokens') / rollout:.0f} sampled tokens/s), update {train:.1f} s ({mean('tokens') / train:.0f} trained "
        f"tokens/s), {mean('images/seen') / (rollout + train):.1f} images/s; gradient norm {mean('grad_norm'):.2g}; "
    )
    gpu = gpu_at_hand()
    if gpu is not None and any(name in gpu.name for name in ("H100", "H200")):
        least = 6 * parameters_of(report) * mean("tokens") / train / HOPPER_FLOPS
        text += f"utilisation of the update by trained tokens alone {least:.1%} of {HOPPER_FLOPS / 1e12:.0f} TFLOP/s, "
    if gpu is not None:
        text += f"peak memory {gib(torch.cuda.max_memory_allocated())}; "
    worst = max(row["logprob_mismatch/mean"] for row in rows)
    return text + within(mismatch=(worst, MEAN))
