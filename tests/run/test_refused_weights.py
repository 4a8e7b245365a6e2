"""A run whose server refuses the weights of a step, such as with a full GPU, or behind a proxy that answers 502."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from vlmrl.config import Algo, Config, Data, Eval, EvalData, Model, Rollout, Train
from vlmrl.engine.base import EngineError
from vlmrl.report.run_log import read_rows
from vlmrl.run import stages
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest

pytestmark = pytest.mark.slow


def tasks(index, seed):
    return {"prompt": "How many?"}


def length(text, task):
    return len(text) / 100


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_step_whose_weights_a_server_refuses_is_finished_and_saved(tmp_path, qwen3_vl, monkeypatch, staleness):
    """With `checkpoint.every` 0 all steps were lost to `--resume`, otherwise those since the last checkpoint."""
    original, calls = stages.push_weights, count(1)

    async def refused(*args):
        if next(calls) == 2:
            raise EngineError("a server refused the weights")
        return await original(*args)

    config = Config(
        output_dir=str(tmp_path),
        model=Model(path=str(qwen3_vl), device="cpu"),
        data=Data(generator=tasks, size=10),
        reward=length,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=4),
        algo=Algo(corrections=("token_truncation",) * staleness),
        train=Train(steps=3, groups_per_batch=1, image_check=False, max_staleness=staleness),
        eval=Eval(data=EvalData(generator=tasks, size=1, seed=1), every=2),
    )
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
