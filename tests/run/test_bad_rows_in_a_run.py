"""Whole runs whose data has bad rows, and evaluations that leave tasks out: metrics, the console, the summary."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from vlmrl import Env, RetryTurn, obs
from vlmrl.config import Config, Data, Eval, EvalData, Optim, Rollout, Train
from vlmrl.engine.base import Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_data import load_run
from vlmrl.report.run_log import RunLog, read_rows
from vlmrl.run import loop
from vlmrl.run.build import build_run
from vlmrl.run.evaluate import evaluate_run

pytestmark = pytest.mark.slow


class Half(Env):
    """Pays half of the members. It rejects every response to a prompt that begins with "never"."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        if self.task.prompt[0]["content"][-1]["text"].startswith("never"):
            raise RetryTurn("no")
        return obs(), True, {"reward": float(len(response_text) % 2)}

    def finish(self, ending: str) -> float | None:
        return None if ending == "env_done" else 0.0


def write(folder: Path, name: str, *prompts: str, broken: int = 0) -> str:
    """A dataset of one image a row, of which the first ``broken`` do not decode."""
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    (folder / "broken.png").write_bytes(b"\x89PNG broken")
    lines = [
        json.dumps({"prompt": prompt, "images": ["broken.png" if number < broken else "a.png"], "answer": "x"})
        for number, prompt in enumerate(prompts)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder / f"{name}.jsonl")


def config(folder: Path, limit: int | None, held_out: str) -> Config:
    data = Data(write(folder, "rows", "one", "two", "three", "four", broken=1), max_prompt_tokens=limit)
    return Config(
        name="bad",
        output_dir=str(folder / "runs"),
        data=data,
        env=Half,
        rollout=Rollout(group_size=4, max_tokens=256, max_response_tokens=4, max_failed_fraction=0.5),
        eval=Eval(data=EvalData(held_out), temperature=0.0),
        optim=Optim(lr=1e-4),
        train=Train(steps=2, groups_per_batch=3, image_check=False),
        save_model=False,
    )


@pytest.mark.parametrize("limit", [None, 100])
def test_a_run_with_a_bad_row_trains_on_the_others(tmp_path: Path, limit: int | None):
    held_out = write(tmp_path, "held_out", "five", "six", "seven", broken=1)
    run = build_run(config(tmp_path, limit, held_out))
    log, console = RunLog(run.folder), Console(file=io.StringIO(), soft_wrap=True)
    summary = asyncio.run(loop.train(run, log, RunProgress(console)))
    log.close()
    run.engine.close()
    rows = read_rows(run.folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["trajectories"] - row["failed"] for row in steps] == [12.0, 12.0]  # 3 groups of 4
    assert sum(row["groups/bad_rows"] for row in steps) >= 1.0  # in 6 draws of 4 rows
    assert all(row["groups/dropped"] == row["groups/bad_rows"] == row["failed"] / 4 for row in steps)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    failures = load_run(run.folder).failures
    assert len([each for each in failures if each["kind"] == "train"]) == sum(row["failed"] for row in steps)
    assert {(each["retried"], "broken.png" in each["error"]) for each in failures} == {(False, True)}
    in_steps = sum(row["failed"] > 0 for row in steps)
    assert output.count("broken.png") == 2 + in_steps  # one line each, of two evaluations and the steps
    before = next(row for row in rows if "eval/reward/mean" in row)
    assert (before["eval/tasks"], before["eval/tasks_left_out"], before["eval/tasks_left_out/bad_rows"]) == (2, 1, 1)
    assert "eval000000: the mean reward is over 2 tasks, 1 left out (1 bad rows)" in output
    assert summary["reward_before_tasks_left_out"] == 1.0


def test_greedy_evaluation_counts_tasks_whose_responses_the_env_rejects(tmp_path: Path):
    held_out = write(tmp_path, "held_out", "five", "never six", "never seven", "never eight", "a" * 500)
    run = build_run(config(tmp_path, 200, held_out))
    played: list[str] = []

    def response(request: Request, turn: int) -> str:
        played.append(request.trajectory_id)
        return "a"

    run.engine.close()
    run = replace(run, engine=ScriptedEngine(response, run.model.renderer))  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), soft_wrap=True)
    result = asyncio.run(evaluate_run(run, RunProgress(console), label="eval"))
    metrics = result.metrics()
    names = {name: value for name, value in metrics.items() if name.startswith("tasks")}
    assert names == {
        "tasks": 1.0,
        "tasks_left_out": 4.0,
        "tasks_left_out/too_long": 1.0,
        "tasks_left_out/bad_rows": 0.0,
        "tasks_left_out/rejected": 3.0,
        "tasks_left_out/failed": 0.0,
    }
    assert "1 tasks, 4 left out (1 prompt too long, 3 rejected with RetryTurn)" in console.file.getvalue()  # type: ignore[attr-defined]
    assert sorted(played) == [f"eval/{n:05d}/00" for n in (0, 1, 1, 2, 2, 3, 3)]  # one retry of the turn, no refill
