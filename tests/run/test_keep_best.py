"""The model with the best held-out reward is kept beside the newest checkpoints."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from testing.runs import short_quickstart

from vlmrl.config import Checkpoint, Data, Eval
from vlmrl.run.build import build_run
from vlmrl.run.checkpointing import LoopState, best_reward, save_best
from vlmrl.train.checkpoint import save_random


def run_in(folder, checkpoint: Checkpoint):
    def save(target, weights) -> None:
        (target / "config.json").write_text("{}")

    config = SimpleNamespace(checkpoint=checkpoint)
    model = SimpleNamespace(is_on_meta=False, save=save)
    return SimpleNamespace(config=config, colocated=False, folder=folder, model=model)


def rewarded(run, rewards: list[float]) -> LoopState:
    state = LoopState()
    for step, reward in enumerate(rewards, start=1):
        asyncio.run(save_best(run, None, state, step, reward))
    return state


def resumed(run) -> LoopState:
    """The state of a run that resumes from a checkpoint which knew of a reward of 0.5."""
    state = LoopState(best=0.5)
    checkpoint = run.folder / "checkpoints/step000001"
    checkpoint.mkdir(parents=True)
    save_random(checkpoint, "driver", state.random)
    state.restore(SimpleNamespace(restore=lambda checkpoint: None), checkpoint)
    return state


def test_the_first_of_the_best_models_is_kept(tmp_path):
    state = rewarded(run_in(tmp_path, Checkpoint(keep_best=True)), [0.25, 0.5, 0.5, 0.375])
    assert state.best == 0.5
    assert json.loads((tmp_path / "best/best.json").read_text()) == {"step": 2, "reward": 0.5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


def test_a_resumed_run_keeps_a_better_model_of_a_later_step(tmp_path):
    rewarded(run_in(tmp_path, Checkpoint(keep_best=True)), [0.5])
    assert [best_reward(tmp_path, saved) for saved in (None, 0.25, 0.75)] == [0.5, 0.5, 0.75]
    assert best_reward(tmp_path / "none", None) is None


def test_a_resumed_run_whose_best_model_is_gone_keeps_the_next_one(tmp_path):
    """As after a kill between the two renames that replace it, or if somebody moved it away."""
    run = run_in(tmp_path, Checkpoint(keep_best=True))
    rewarded(run, [0.5])
    (tmp_path / "best").rename(tmp_path / ".best.old")
    state = resumed(run)
    asyncio.run(save_best(run, None, state, 2, 0.25))
    assert json.loads((tmp_path / "best/best.json").read_text()) == {"step": 2, "reward": 0.25}


def test_without_the_setting_none_is_kept(tmp_path):
    rewarded(run_in(tmp_path, Checkpoint()), [0.25])
    assert not list(tmp_path.iterdir())


def test_it_needs_held_out_tasks(tmp_path):
    config = short_quickstart(tmp_path, checkpoint=Checkpoint(keep_best=True))
    config = replace(config, eval=Eval(), data=Data(generator=config.data.generator, size=8))
    with pytest.raises(ValueError, match=r"checkpoint\.keep_best compares held-out rewards: set eval\.data"):
        build_run(config)
