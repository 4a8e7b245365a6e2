"""What the loop makes of the settings: its trainer, its buffer, and the warning about a step from few groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vlmrl.config import Algo, Config, Optim, Rollout, Train
from vlmrl.data import TaskStream
from vlmrl.rollout.buffer import AsynchronousBuffer, SynchronousBuffer
from vlmrl.run import loop
from vlmrl.run.loop import small_step_warning


@pytest.mark.parametrize(
    ("train", "groups", "warns"),
    [
        (Train(groups_per_batch=16), 16, False),
        (Train(groups_per_batch=16), 9, False),
        (Train(groups_per_batch=16), 8, True),
        (Train(groups_per_batch=16), 1, True),
        (Train(groups_per_batch=16), 0, False),  # no optimizer step
        (Train(groups_per_batch=16, groups_per_step=4), 5, False),
        (Train(groups_per_batch=16, groups_per_step=4), 2, True),
        (Train(groups_per_batch=1), 1, False),
    ],
)
def test_half_of_the_groups_or_fewer_are_reported(train, groups, warns):
    warning = small_step_warning(Config(train=train), 7, groups)
    assert (warning is not None) is warns
    if warning:
        assert warning.startswith(f"warning: step 7 took an optimizer step from {groups} of")


def spec_of(config: Config):
    started = SimpleNamespace(start=lambda spec: spec)
    return loop.new_trainer(SimpleNamespace(config=config, trainer=started))


def test_the_trainer_has_the_settings_of_the_config(tmp_path):
    config = Config(
        algo=Algo(entropy_coef=0.25),
        optim=Optim(lr=0.5),
        rollout=Rollout(temperature=0.0),
        train=Train(
            steps=3,
            groups_per_batch=8,
            groups_per_step=2,
            max_staleness=1,
            tokens_per_micro_batch=77,
            replay_routing=False,
        ),
    )
    spec = spec_of(config)
    assert (spec.optim.lr, spec.algo.entropy_coef, spec.algo.old_policy) == (0.5, 0.25, "rollout")
    assert (spec.total_steps, spec.groups_per_step, spec.tokens_per_micro_batch) == (12, 2, 77)
    assert not spec.replay_routing
    assert spec.temperature == 1.0  # greedy rollouts: logprobs are those of the model itself
    synchronous = replace(config, rollout=Rollout(temperature=0.5), train=replace(config.train, max_staleness=0))
    spec = spec_of(synchronous)
    assert (spec.temperature, spec.algo.old_policy) == (0.5, "trainer")


@pytest.mark.parametrize(("max_staleness", "kind"), [(0, SynchronousBuffer), (1, AsynchronousBuffer)])
def test_rollouts_go_on_during_training_only_with_max_staleness(max_staleness, kind):
    runner = SimpleNamespace(config=Rollout())
    config = Config(train=Train(max_staleness=max_staleness))
    parts = {"runner": lambda: runner, "stream": TaskStream, "tasks": ["a task"], "filters": []}
    run = SimpleNamespace(config=config, **parts)
    assert type(loop.new_buffer(run)) is kind
