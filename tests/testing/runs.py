"""A short version of the quickstart, a way to train it, and which of its numbers repeat."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vlmrl.config import Config
from vlmrl.config.code import load_object, resolve_config
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import loop
from vlmrl.run.build import build_run

RECIPES = Path(__file__).parents[2] / "recipes"


def short_quickstart(tmp_path: Path, **changes: Any) -> Config:
    config = resolve_config(load_object(f"{RECIPES / 'quickstart.py'}:config")(), RECIPES)
    return replace(
        config,
        output_dir=str(tmp_path / "runs"),
        data=replace(config.data, size=32),
        eval=replace(config.eval, data=replace(config.eval.data, size=8), every=1),
        warm_start=replace(config.warm_start, steps=5, trajectories_per_step=4),
        train=replace(config.train, steps=2, groups_per_batch=4),
        rollout=replace(config.rollout, group_size=4),
        **changes,
    )


def train(config: Config):
    run = build_run(config)
    log = RunLog(run.folder)
    try:
        summary = asyncio.run(loop.train(run, log, RunProgress(Console(quiet=True))))
    finally:
        log.close()
        run.close()
    return run, log.rows(), summary


def repeatable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without times and the memory of the process's images, which a deterministic run does not repeat."""
    return {
        name: value
        for name, value in row.items()
        if not (name.startswith("time") or "seconds" in name or name.endswith("_gib"))
    }
