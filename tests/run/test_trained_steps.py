"""A trained step after which something fails is finished and saved: its weights are refused by a server, or it cannot be recorded."""

from __future__ import annotations

import errno
import json
import signal
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from vlmrl.algos import LossOutputs, loss
from vlmrl.config import Algo, Config, Data, Eval, EvalData, Model, Rollout, Train
from vlmrl.engine.base import EngineError
from vlmrl.report.run_log import RunLog, read_rows
from vlmrl.run import stages
from vlmrl.run.checkpointing import LoopState
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest

pytestmark = pytest.mark.slow


BAD_STEP = 2
steps = []  # of the loss


def tasks(index, seed):
    return {"prompt": "How many?"}


def length(text, task):
    return len(text) / 100


def config_of(tmp_path, model, staleness, **algo):
    return Config(
        output_dir=str(tmp_path),
        model=Model(path=str(model), device="cpu"),
        data=Data(generator=tasks, size=10),
        reward=length,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4),
        algo=Algo(**algo),
        train=Train(steps=3, groups_per_batch=1, image_check=False, max_staleness=staleness),
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_step_whose_weights_a_server_refuses_is_finished_and_saved(tmp_path, qwen3_vl, monkeypatch, staleness):
    """With `checkpoint.every` 0 all steps were lost to `--resume`, otherwise those since the last checkpoint."""
    original, calls = stages.push_weights, count(1)

    async def refused(*args):
        if next(calls) == 2:
            raise EngineError("a server refused the weights")
        return await original(*args)

    evaluation = Eval(data=EvalData(generator=tasks, size=1, seed=1), every=2)
    corrections = ("token_truncation",) * staleness
    config = replace(config_of(tmp_path, qwen3_vl, staleness, corrections=corrections), eval=evaluation)
    monkeypatch.setattr(stages, "push_weights", refused)
    with pytest.raises(EngineError, match="a server refused the weights"):
        run_training(config)
    [saved] = (config.folder / "checkpoints").iterdir()
    state = json.loads((saved / "run.json").read_text())
    assert (state["step"], state["evaluated"]) == (2, False)
    assert (config.folder / "model/config.json").exists()
    run_training(replace(config, train=replace(config.train, steps=4)), resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/reward/mean" in row] == [0, 2, 4]


async def test_after_a_stop_a_refused_update_is_no_failure_of_the_run(monkeypatch):
    """The signal may have ended the server, too: the run ends as a stopped one."""

    async def refused(*args):
        raise EngineError("a server refused the weights")

    monkeypatch.setattr(stages, "push_weights", refused)
    stop, evaluator = StopRequest(), SimpleNamespace(failure=None)
    stop.request(signal.SIGTERM)
    await stages.push_to_finish(None, None, 1, evaluator, stop)  # type: ignore[arg-type]
    assert evaluator.failure is None


@loss(has_ratio=True)
def own_loss(inputs):
    """Its metric is NaN at one step."""
    steps.append(len(steps) + 1)
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    value = torch.nan if steps[-1] == BAD_STEP else 1.0
    return LossOutputs(-ratio * inputs.advantages, {"own": torch.full_like(ratio, value)})


def refused_by_the_disk(monkeypatch):
    """Trajectories of one step."""
    original = RunLog.append_lines

    def append_lines(log, name, lines):
        if name == "trajectories.jsonl" and json.loads(lines.splitlines()[0])["step"] == BAD_STEP:
            raise OSError(errno.EIO, "the disk stumbled")
        original(log, name, lines)

    monkeypatch.setattr(RunLog, "append_lines", append_lines)


@pytest.mark.parametrize("why", ["metric", "disk"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_trained_step_that_cannot_be_recorded_is_saved(why, staleness, tmp_path, qwen3_vl, monkeypatch):
    """With `checkpoint.every` 0 all steps were lost to `--resume`, otherwise those since the last checkpoint."""
    steps.clear()
    config = config_of(tmp_path, qwen3_vl, staleness, loss=own_loss if why == "metric" else "ppo")
    with monkeypatch.context() as patched:
        if why == "disk":
            refused_by_the_disk(patched)
        with pytest.raises((ValueError, OSError), match=r"metric 'own' must be one finite|the disk stumbled"):
            run_training(config)
    [saved] = (config.folder / "checkpoints").iterdir()
    assert json.loads((saved / "run.json").read_text())["step"] == BAD_STEP
    assert (config.folder / "model/config.json").exists()
    run_training(replace(config, algo=Algo()), resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 3]


def test_a_disk_that_fails_leaves_the_state_of_the_step_before():
    """Or its step would be the new one's, with the sizes of files and the random numbers of the one before."""

    def fails():
        raise OSError(errno.EIO, "the disk stumbled")

    state = LoopState(step=1, batches={"next": 1})
    with pytest.raises(OSError, match="the disk stumbled"):
        state.end_step(2, {"next": 2}, SimpleNamespace(sizes=fails), evaluated=True)  # type: ignore[arg-type]
    assert (state.step, state.batches) == (1, {"next": 1})
