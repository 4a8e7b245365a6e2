"""Asynchronous runs: each logprob belongs to the policy version it is labelled with."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from testing.runs import short_quickstart, train

from vlmrl.config import Algo, Config, Eval, Optim, Rollout, Train, WarmStart
from vlmrl.engine.hf.batch import RunningBatch
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.model.loading import load_model
from vlmrl.run import loop, stages
from vlmrl.samples import concat
from vlmrl.train.controller import RunTrainer
from vlmrl.train.trainer import Trainer, TrainerSpec

pytestmark = pytest.mark.slow


def ahead(tmp_path, **changes) -> Config:
    """Large steps in which every sample is trained, and responses so long that weight updates interrupt them."""
    return replace(
        short_quickstart(tmp_path, **changes),
        rollout=Rollout(group_size=1, max_turns=2, max_tokens=512, max_response_tokens=200),
        warm_start=WarmStart(),
        algo=Algo(loss="sft", corrections=("token_truncation",)),
        optim=Optim(lr=3e-3),
        train=Train(steps=4, groups_per_batch=2, max_staleness=1, image_check=False),
        eval=Eval(),
        save_model=False,
    )


class Interrupted:
    """Responses of the next batch begin while one is trained, and go on after the weight update: on any machine it interrupts them."""

    def __init__(self, monkeypatch, groups_per_batch: int) -> None:
        self.trained, self.is_training, self.sampled = 0, False, threading.Event()
        generate, advance = HFEngine.generate_batch, RunningBatch.advance

        async def generate_late(engine, requests):
            batch = int(requests[0].trajectory_id.removeprefix("group").partition("/")[0]) // groups_per_batch
            while self.trained < batch:
                await asyncio.sleep(0.001)
            self.engine = engine
            return await generate(engine, requests)

        def advance_late(batch):
            if self.is_training:
                self.sampled.set()
            while self.is_training and self.engine._pause is None and not self.engine._closed:
                time.sleep(0.001)
            advance(batch)

        monkeypatch.setattr(HFEngine, "generate_batch", generate_late)
        monkeypatch.setattr(RunningBatch, "advance", advance_late)

    def begin(self) -> None:
        """Before a batch is trained: let the next one begin."""
        self.sampled.clear()
        self.is_training = True
        self.trained += 1
        assert self.sampled.wait(600)

    def end(self) -> None:
        """After the weight update."""
        self.is_training = False


def watched(config: Config, monkeypatch):
    """The run's rows, the weights of each version, and each batch with its version and the trainer's own logprobs."""
    weights, batches, outputs = {}, [], []
    push, train_on, step = stages.push_weights, loop.train_on, RunTrainer.step
    responses = Interrupted(monkeypatch, config.train.groups_per_batch)

    async def pushed(run, trainer, version):
        metrics = await push(run, trainer, version)
        weights[version] = {name: weight.clone() for name, weight in trainer.named_weights()}
        responses.end()
        return metrics

    def stepped(trainer, samples):
        outputs.append(step(trainer, samples))
        return outputs[-1]

    def trained(run, trainer, trajectories):
        if not weights:
            weights[0] = {name: weight.clone() for name, weight in trainer.named_weights()}
        responses.begin()
        metrics = train_on(run, trainer, trajectories)
        batches.append((len(weights) - 1, trajectories, outputs[-1].logprobs))
        return metrics

    monkeypatch.setattr(stages, "push_weights", pushed)
    monkeypatch.setattr(loop, "train_on", trained)
    monkeypatch.setattr(RunTrainer, "step", stepped)
    run, rows, _ = train(config)
    run.engine.close()
    return [row for row in rows if "loss" in row], weights, batches


def check_every_logprob(config: Config, weights, batches) -> int:
    """Each sampled token has the logprob that the weights of its version give it, and the trainer's is of the version it
    trained. How many responses were begun under one version and ended under another."""
    policy = load_model(config.model, config.models_dir, config.seed).policy
    scorer = Trainer(policy, TrainerSpec(Algo(), Optim(), total_steps=1, tokens_per_micro_batch=4096))
    for newest, trajectories, by_trainer in batches:
        samples = [row for trajectory in trajectories for row in concat(trajectory)]
        scores = []
        for version in range(newest + 1):
            policy.load_weights(weights[version].items())
            scores.append(scorer.score(samples))
        for index, sample in enumerate(samples):
            sampled = np.array(sample.loss_mask) == 1
            of_versions = np.stack([of_version[index] for of_version in scores])
            own = of_versions[np.array(sample.policy_versions), np.arange(len(sampled))]
            assert np.abs(own - sample.rollout_logprobs)[sampled].max() < 1e-3
            assert np.abs(of_versions[newest] - by_trainer[index])[sampled].max() < 1e-3
        if newest:
            moved = [np.abs(new - old).max() for new, old in zip(scores[newest], scores[newest - 1], strict=True)]
            assert max(moved) > 0.1  # or equal logprobs would say nothing
    turns = [turn for _, trajectories, _ in batches for trajectory in trajectories for turn in trajectory.turns]
    return sum(len(set(turn.policy_versions)) > 1 for turn in turns)


def test_every_logprob_is_of_the_weights_it_says(tmp_path, monkeypatch):
    config = ahead(tmp_path)
    rows, weights, batches = watched(config, monkeypatch)
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert check_every_logprob(config, weights, batches) >= 3  # one or two of each batch but the first


@pytest.mark.parametrize("old_policy", [None, "trainer"])
def test_ratios_are_to_the_rollout_policy_unless_old_policy_is_set(tmp_path, old_policy):
    algo = Algo(entropy_coef=1.0, old_policy=old_policy)  # no group has an advantage: the bonus moves the weights
    _, rows, _ = train(replace(ahead(tmp_path), algo=algo))
    rows = [row for row in rows if "loss" in row]
    off = [abs(row["ratio"] - 1) for row in rows]
    assert off[0] < 1e-6
    if old_policy == "trainer":
        assert off == [0, 0, 0, 0]
    else:
        assert min(off[1:]) > 1e-5
        assert max(row["mismatch/ratio_max"] for row in rows) > 1.01
