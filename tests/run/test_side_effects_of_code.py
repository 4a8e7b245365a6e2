"""A run whose env or reward function changes the process that both run in: it trains, and what it has trained is saved."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vlmrl
from vlmrl import Config, Data, Model, Rollout, Train
from vlmrl.config import WarmStart, resolve_config
from vlmrl.config.collection import Collection
from vlmrl.report.run_log import read_rows
from vlmrl.rollout.runner import RolloutError
from vlmrl.run import recorder
from vlmrl.run.collector import run_collection
from vlmrl.run.eval_program import run_evaluation
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest

pytestmark = pytest.mark.slow


def tasks(index, seed):
    return {"prompt": "Say something.", "answer": "a"}


def length(text, task):
    return len(text) / 100


def config_of(output_dir, reward=length, steps=3, **changes):
    return Config(
        name="say",
        output_dir=str(output_dir),
        model=Model(path="tiny:qwen3", device="cpu"),
        data=Data(generator=tasks, size=32, held_out=2),
        reward=reward,
        rollout=Rollout(group_size=2, max_turns=1, max_response_tokens=4, max_tokens=64, max_env_retries_per_turn=0),
        train=Train(steps=steps, groups_per_batch=1),
        **changes,
    )


@pytest.fixture
def leaking():
    """A reward function whose seventh call, in step 3, opens all files that the process may have, and each further one another."""
    leaked, calls = [], []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def reward(text, task):
        calls.append(task)
        opened = itertools.count() if len(calls) == 7 else range(len(calls) > 7)
        for _ in opened:  # the calls before are two of the evaluation, and four of two steps
            leaked.append(os.open(os.devnull, os.O_RDONLY))
        return len(text) / 100

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 200, limits[1]))
    yield reward
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for handle in leaked:
        os.close(handle)


def test_a_run_that_may_open_no_more_files_is_saved(tmp_path, leaking):
    """An env may leak files or sockets. Neither the model nor a checkpoint could be written, and all steps were lost."""
    config = config_of(tmp_path, leaking, steps=9)
    with pytest.raises((RolloutError, OSError), match="Too many open files"):
        run_training(config)
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["step000002"]
    assert (config.folder / "model/config.json").exists() and (config.folder / "crash.txt").exists()


def test_a_stopped_run_whose_curve_cannot_be_drawn_is_saved(tmp_path, monkeypatch, capsys):
    """As with `text.usetex` in the settings of matplotlib, without LaTeX. With `checkpoint.every` 0 all steps were lost."""
    stop = StopRequest()

    def undrawn(*args, **options):
        raise RuntimeError("latex could not be found")

    def on_row(row):
        if row["step"] == 2:
            stop.request(signal.SIGTERM)

    monkeypatch.setattr(recorder, "draw_curve", undrawn)
    config = config_of(tmp_path, steps=9)
    run_training(config, stop=stop, on_row=on_row)
    assert stop.number == signal.SIGTERM
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["step000002"]
    assert (config.folder / "model/config.json").exists()
    assert "the curve and the page could not be written: latex could not be found" in capsys.readouterr().out


def moving(text, task):
    """Leaves the process in a folder that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return len(text) / 100


def test_the_files_of_a_run_whose_code_changes_the_working_directory_stay_together(tmp_path, monkeypatch):
    """All of a run was trained, then neither its model nor a checkpoint could be written."""
    monkeypatch.chdir(tmp_path)
    result = vlmrl.train(config_of("runs", moving))
    assert result.folder == tmp_path / "runs/say"
    assert {"model", "metrics.jsonl", "summary.json"} <= {path.name for path in result.folder.iterdir()}
    os.chdir(tmp_path)
    config = resolve_config(config_of("runs", moving))
    run_evaluation(config, ["runs/say"], Path("results.json"))
    assert (tmp_path / "results.json").exists() and list((result.folder / "evaluations").iterdir())
    os.chdir(tmp_path)
    run_collection(config, Collection(out=Path("collected"), tasks=2), "runs/say")
    assert len((tmp_path / "collected/episodes.jsonl").read_text().splitlines()) == 2


def test_an_error_in_a_folder_that_is_gone_fails_its_trajectory_and_a_stop_says_how_to_continue(
    tmp_path, monkeypatch, capsys
):
    """The paths of code and of the command are shown from the working directory."""
    stop, calls = StopRequest(), []

    def reward(text, task):
        calls.append(task)
        if len(calls) == 4:
            moving(text, task)
            raise ValueError("mine")
        return len(text) / 100

    def on_row(row):
        if row["step"] == 3:
            stop.request(signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    config = resolve_config(config_of("runs", reward, steps=9))
    config = replace(config, rollout=replace(config.rollout, max_failed_fraction=1.0))
    run_training(config, stop=stop, on_row=on_row, command=["vlmrl", "train", "say.py"])
    os.chdir(tmp_path)
    assert stop.number == signal.SIGTERM
    assert f"cd {tmp_path} && vlmrl train say.py --resume" in capsys.readouterr().out
    assert any("ValueError: mine" in str(row) for row in read_rows(config.folder / "trajectories.jsonl"))


def right(task, turn):
    return task.answer


def test_a_run_trains_though_a_module_has_turned_gradients_off(tmp_path):
    """As the module of a reward model may when it is imported. Nothing was trained, and a warm start did not say so."""
    config = config_of(tmp_path, warm_start=WarmStart(demonstrate=right, steps=2, trajectories_per_step=2))
    try:
        torch.set_grad_enabled(False)
        run_training(config)
    finally:
        torch.set_grad_enabled(True)
    rows = read_rows(config.folder / "metrics.jsonl")
    norms = [row["sft/grad_norm"] for row in rows if "sft/grad_norm" in row]
    norms += [row["grad_norm"] for row in rows if row.get("reward/std")]
    assert len(norms) >= 2 and min(norms) > 0
