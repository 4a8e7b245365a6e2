"""A step that was trained and cannot be recorded, such as with a metric that is NaN, or when the disk refuses its trajectories."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
import torch

from vlmrl.algos import LossOutputs, loss
from vlmrl.config import Algo, Config, Data, Model, Rollout, Train
from vlmrl.report.run_log import RunLog, read_rows
from vlmrl.run.program import run_training

pytestmark = pytest.mark.slow

BAD_STEP = 2
steps = []  # of the loss


def tasks(index, seed):
    return {"prompt": "How many?"}


def length(text, task):
    return len(text) / 100


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
    config = Config(
        output_dir=str(tmp_path),
        model=Model(path=str(qwen3_vl), device="cpu"),
        data=Data(generator=tasks, size=10),
        reward=length,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4),
        algo=Algo(loss=own_loss if why == "metric" else "ppo"),
        train=Train(steps=3, groups_per_batch=1, image_check=False, max_staleness=staleness),
    )
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
