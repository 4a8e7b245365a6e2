"""The curve and the page of a run are written when it ends."""

import asyncio
import signal
import threading
from types import SimpleNamespace

import pytest

from vlmrl import Data, Model, Rollout, Train
from vlmrl.config import Config
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import last_save, recorder
from vlmrl.run.program import run_training
from vlmrl.run.recorder import Recorder
from vlmrl.run.stopping import StopRequest


@pytest.mark.parametrize(
    ("rows", "files"),
    [
        ([], []),
        ([{"sft/loss": 2.0}], ["trajectories.html"]),
        ([{"eval/reward/mean": 0.5, "eval/standard_error": 0.1}], ["reward.png", "trajectories.html"]),
    ],
)
def test_a_run_that_logged_something_has_a_page_and_one_with_rewards_a_curve(tmp_path, rows, files):
    config = Config(name=tmp_path.name, output_dir=tmp_path.parent)
    run = SimpleNamespace(config=config, model=SimpleNamespace(renderer=SimpleNamespace(decode=None)))
    with RunLog(tmp_path) as log:
        for step, row in enumerate(rows):
            log.log(step, row)
        asyncio.run(Recorder(run, log, RunProgress()).finish())
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl") == files


def tasks(index, seed):
    return {"prompt": "Say something."}


def length(text, task):
    return len(text) / 100


def config_of(output_dir, steps):
    return Config(
        name="say",
        output_dir=str(output_dir),
        model=Model(path="tiny:qwen3", device="cpu"),
        data=Data(generator=tasks, size=32, held_out=2),
        reward=length,
        rollout=Rollout(group_size=2, max_turns=1, max_response_tokens=4, max_tokens=64),
        train=Train(steps=steps, groups_per_batch=1),
    )


@pytest.mark.slow
def test_a_stopped_run_is_saved_before_its_page_is_written(tmp_path, monkeypatch):
    """The page reads all trajectories. With `checkpoint.every` 0, a long run that SIGTERM stopped was killed meanwhile, and lost."""
    config, stop, saved = config_of(tmp_path, steps=9), StopRequest(), []

    def write(*args):
        saved.append(sorted(path.name for path in config.folder.iterdir() if path.is_dir()))

    def on_row(row):
        if row["step"] == 2:
            stop.request(signal.SIGTERM)

    monkeypatch.setattr(recorder, "write_snapshot", write)
    run_training(config, stop=stop, on_row=on_row)
    assert stop.number == signal.SIGTERM and saved == [["checkpoints", "model"]]


@pytest.mark.slow
def test_a_stop_does_not_wait_for_the_page_of_a_run_that_ends(tmp_path, monkeypatch):
    config, stop, is_saved, seen = config_of(tmp_path, steps=2), StopRequest(), threading.Event(), []
    save = last_save.save_stopped

    async def save_stopped(*args):
        await save(*args)
        is_saved.set()

    def write(*args):
        stop.request(signal.SIGTERM)
        seen.append(is_saved.wait(60))  # the whole time only if the run waits for this thread

    monkeypatch.setattr(last_save, "save_stopped", save_stopped)
    monkeypatch.setattr(recorder, "write_snapshot", write)
    run_training(config, stop=stop)
    assert stop.number == signal.SIGTERM and seen == [True, True]
    assert (config.folder / "model/config.json").exists() and (config.folder / "checkpoints/step000002").exists()


@pytest.mark.slow
def test_the_model_is_written_before_the_last_page(tmp_path, monkeypatch):
    config, saved = config_of(tmp_path, steps=1), []
    monkeypatch.setattr(recorder, "write_snapshot", lambda *args: saved.append((config.folder / "model").exists()))
    run_training(config)
    assert saved == [False, True]
