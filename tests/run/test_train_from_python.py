"""``vlmrl.train(config)``: in a script, under a running event loop, with callbacks, ended early and interrupted."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import threading
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

import vlmrl
import vlmrl.train.trainer
from vlmrl import Checkpoint, Config, Data, Env, Eval, Model, Rollout, Train, obs
from vlmrl.run import library


class Ascii(Env):
    unfinished_reward = 0.0

    def step(self, response_text):
        return obs(), True, {"reward": float(response_text.isascii())}


def tasks(index, seed):
    return {"prompt": "Say something.", "answer": "a"}


def config(tmp_path, steps=2, **changes):
    return Config(
        name="library",
        output_dir=str(tmp_path / "runs"),
        model=Model(path="tiny:qwen3", device="cpu"),
        data=Data(generator=tasks, size=32, held_out=4),
        env=Ascii,
        rollout=Rollout(group_size=2, max_turns=1, max_response_tokens=4, max_tokens=64),
        train=Train(steps=steps, groups_per_batch=2),
        **changes,
    )


@pytest.mark.slow
def test_it_trains_under_a_running_loop_and_returns_what_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ipykernel", "-f", "kernel.json"])
    rows: list = []

    async def cell():
        return vlmrl.train(config(tmp_path, eval=Eval(every=1)), on_step=rows.append, on_evaluation=rows.append)

    result = asyncio.run(cell())
    assert not result.interrupted and result.folder == tmp_path / "runs/library"
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/reward/mean" in row] == [0, 1, 2]
    assert [row["step"] for row in result.metrics] == [row["step"] for row in rows]
    assert {"reward_before", "reward_after"} <= result.summary.keys()
    assert len(result.trajectories(1)) >= 4 and result.trajectories()[-1]["step"] == 2
    assert result.model is not None and result.model.tokenizer.encode("a")
    assert sum(weight.numel() for weight in result.model.policy.parameters()) > 1000


@pytest.mark.slow
def test_a_result_stays_that_of_its_training_after_another_one_of_the_same_name(tmp_path):
    """As in a notebook that compares two settings: the second training renames the folder of the first."""
    first = vlmrl.train(config(tmp_path, steps=1))
    summary, played = first.summary, first.trajectories()
    second = vlmrl.train(config(tmp_path, steps=2, seed=1))
    assert first.summary == summary and first.trajectories() == played
    assert first.folder == tmp_path / "runs/library.1" and second.folder == tmp_path / "runs/library"
    first.refresh()
    assert first.steps == [0, 1] and second.steps == [0, 1, 2]
    shutil.rmtree(first.folder)
    with pytest.raises(ValueError, match="is that of another run"):
        first.summary  # noqa: B018


@pytest.mark.slow
def test_a_callback_ends_it_early_with_the_evaluation_and_the_model(tmp_path):
    result = vlmrl.train(config(tmp_path, steps=50), on_step=lambda row: row["step"] == 2)
    assert [row["step"] for row in result.metrics] == [0, 1, 2, 2]
    assert "reward_after" in result.summary and (result.folder / "model/config.json").exists()


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_itself_as_after_its_last_step(tmp_path):
    changes = {"reward": lambda text, task: 1.0, "env": None, "checkpoint": Checkpoint(every=100)}
    idle = replace(config(tmp_path), train=Train(steps=50, groups_per_batch=2, stop_after_idle=3), **changes)
    result = vlmrl.train(idle)
    assert [row["step"] for row in result.metrics] == [0, 1, 2, 3, 3]
    assert "reward_after" in result.summary and (result.folder / "checkpoints/step000003").exists()


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_trained(tmp_path):
    def interrupt(row):
        if row["step"] == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    result = vlmrl.train(config(tmp_path, steps=500), on_step=interrupt)
    last = result.metrics[-1]["step"]
    assert result.interrupted and 2 <= last < 500
    assert (result.folder / "model/config.json").exists() and result.model is not None
    result = vlmrl.train(config(tmp_path, steps=last + 2), resume=True)  # though checkpoint.every is 0
    assert [row["step"] for row in result.metrics] == [0, *range(1, last + 3), last + 2]
    assert (
        result.folder / f"checkpoints/step{last + 2:06d}"
    ).exists()  # or a further resume would repeat the two steps


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_would_end_the_script_saves_what_was_trained(tmp_path, monkeypatch, number):
    """As from Slurm: it ended a script at once, with neither a checkpoint nor a model. Any thread may receive it."""
    monkeypatch.setattr(library, "GRACE_SECONDS", 600.0)  # this process would end
    rows = []

    def stop(row):
        rows.append(row)
        if row["step"] == 2:
            signal.pthread_kill(threading.get_ident(), number)

    earlier = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stopped:
            vlmrl.train(config(tmp_path, steps=500), on_step=stop)
        assert stopped.value.code == 128 + number and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, earlier)
    assert 2 <= rows[-1]["step"] < 500
    for name in ("model/config.json", f"checkpoints/step{rows[-1]['step']:06d}"):
        assert (tmp_path / "runs/library" / name).exists()


@pytest.mark.slow
def test_an_interrupt_ends_it_in_a_coroutine_too(tmp_path):
    """asyncio's own handler only cancels the task, which waits for no other."""

    async def cell():
        handler = signal.getsignal(signal.SIGINT)
        result = vlmrl.train(config(tmp_path, steps=30), on_step=interrupt)
        assert signal.getsignal(signal.SIGINT) is handler
        return result

    def interrupt(row):
        if row["step"] == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    result = asyncio.run(cell())
    assert result.interrupted and 2 <= result.metrics[-1]["step"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_your_own_is_called(tmp_path, ending):
    """One that ends the training by ``on_step``, for example."""
    seen: list[int] = []

    def send_once(row):
        if row["step"] == 2:
            signal.pthread_kill(threading.main_thread().ident, ending)
        return bool(seen)

    earlier = signal.signal(ending, lambda number, frame: seen.append(number))
    try:
        result = vlmrl.train(config(tmp_path, steps=30), on_step=send_once)
    finally:
        signal.signal(ending, earlier)
    assert seen == [ending] and not result.interrupted and result.metrics[-1]["step"] < 30


@pytest.mark.slow
def test_an_env_whose_file_was_edited_since_the_last_training_is_the_new_one(tmp_path):
    """In a notebook, the second training had the rewards of the file as it was at the first."""
    file, mean = tmp_path / "edited_env.py", []
    for reward in ("0.0", "0.25"):
        file.write_text(f"def graded(text, task):\n    return {reward}\n")
        result = vlmrl.train(replace(config(tmp_path, steps=1), env=None, reward=f"{file}:graded"))
        mean.append(result.metrics[-1]["eval/reward/mean"])
    assert mean == [0.0, 0.25]


@pytest.mark.slow
def test_a_reward_whose_task_exits_fails_its_trajectory_and_not_the_run(tmp_path):
    """Code of a policy may call `exit()`. The run ended in its first step, as if it were complete."""
    exited = []

    async def graded(response):
        if len(exited) < 2:
            exited.append(response)
            raise SystemExit(0)
        return float(response.isascii())

    async def reward(text, task):
        return (await asyncio.gather(graded(text), asyncio.sleep(0)))[0]

    result = vlmrl.train(replace(config(tmp_path), env=None, reward=reward))
    assert len(exited) == 2 and [row["step"] for row in result.metrics if "reward/mean" in row] == [1, 2]


@pytest.mark.slow
def test_an_error_of_a_callback_is_raised(tmp_path):
    def broken(row):
        raise LookupError("no such metric")

    with pytest.raises(LookupError, match="no such metric"):
        vlmrl.train(config(tmp_path), on_step=broken)


def test_main_in_a_notebook_says_what_to_call(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(ValueError, match=r"In a notebook call vlmrl.train"):
        vlmrl.main(Config)


@pytest.mark.slow
def test_trainings_in_threads_load_their_models_one_after_the_other(tmp_path):
    """Both failed as their output layers had no weights, and so did each later model of the process, also one of the user's own."""
    before = torch.nn.init.normal_, PreTrainedModel.tie_weights
    both, results = threading.Barrier(2), {}

    def run(name):
        both.wait()
        results[name] = vlmrl.train(replace(config(tmp_path, steps=1), name=name))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torch.nn.init.normal_, PreTrainedModel.tie_weights) == before
    assert [results[name].metrics[-1]["step"] for name in ("first", "second")] == [1, 1]
    for result in results.values():
        model = result.model.policy.model
        assert model.lm_head.weight is model.model.embed_tokens.weight
