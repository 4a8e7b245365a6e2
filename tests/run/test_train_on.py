"""What the loop gives the trainer: its settings, and a batch's samples with their advantages."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from testing.runs import train

from vlmrl.config import Algo, Config, Data, Optim, Rollout, Train
from vlmrl.data import TaskStream
from vlmrl.run import loop
from vlmrl.run.build import build_run
from vlmrl.samples import concat

pytestmark = pytest.mark.slow  # each builds a run

NO_STD = {"grpo.scale_by_std": False}  # an advantage is a reward minus its group's mean


def settings(tmp_path, **changes) -> Config:
    """Two groups of two short responses to a text."""
    base = Config(
        output_dir=str(tmp_path),
        data=Data(generator=lambda index, seed: {"prompt": f"Say {index}."}, size=8),
        reward=lambda text, task: float(len(text) % 2),
        rollout=Rollout(group_size=2, max_tokens=128, max_response_tokens=8),
        train=Train(steps=1, groups_per_batch=2, image_check=False),
        save_model=False,
    )
    return replace(base, **changes)


def test_the_schedule_has_a_place_for_each_optimizer_step_and_the_trainer_has_the_rollouts_temperature(tmp_path):
    """Two batches of two optimizer steps: the rates are 1, 3/4, 1/2 and 1/4 of the peak, and a batch's metric is their mean."""
    config = settings(
        tmp_path,
        optim=Optim(lr=1e-3, schedule="linear"),
        rollout=Rollout(group_size=2, max_tokens=128, max_response_tokens=8, temperature=2.0),
        train=Train(steps=2, groups_per_batch=2, groups_per_step=1, image_check=False),
    )
    run, rows, _ = train(config)
    run.engine.close()
    steps = [row for row in rows if "loss" in row]
    assert [row["lr"] for row in steps] == pytest.approx([0.875e-3, 0.375e-3])
    assert all(row["logprob_mismatch/max"] < 1e-4 for row in steps)


class Batch:
    """A batch that the run's engine played, and the samples that the loop gives the trainer."""

    def __init__(self, config: Config) -> None:
        self.run = build_run(config)
        self.trainer = loop.new_trainer(self.run)
        self.played = asyncio.run(self.run.runner().play(TaskStream(self.run.tasks), 2, "x")).trajectories
        self.rows = [sample for trajectory in self.played for sample in concat(trajectory)]
        for number, trajectory in enumerate(self.played):  # rewards 0 1 2 3, in groups 0 1 and 2 3
            trajectory.ending, trajectory.turns[0].reward, trajectory.final_reward = "env_done", None, float(number)

    def train(self):
        """Returns the metrics, and the advantage of each trajectory by its number."""
        step, given = self.trainer.step, []
        self.trainer.step = lambda samples: given.extend(samples) or step(samples)
        metrics = loop.train_on(self.run, self.trainer, self.played)
        self.run.engine.close()
        numbers = {trajectory.id: number for number, trajectory in enumerate(self.played)}
        return metrics, {numbers[sample.trajectory_id]: sample.advantage for sample in given}


def test_truncated_trajectories_are_left_out_and_still_count_in_the_baseline(tmp_path):
    batch = Batch(settings(tmp_path, algo=Algo(mask_truncated=True, options=NO_STD)))
    batch.played[0].ending, batch.played[3].ending = "length", "max_tokens"
    metrics, advantages = batch.train()
    assert advantages == {1: 0.5, 2: -0.5}
    assert metrics["left_out/overlong"] == batch.played[0].num_sampled + batch.played[3].num_sampled > 0


def test_a_batch_of_truncated_trajectories_is_not_trained(tmp_path):
    batch = Batch(settings(tmp_path, algo=Algo(mask_truncated=True)))
    for trajectory in batch.played:
        trajectory.ending = "length"
    metrics, advantages = batch.train()
    assert advantages == {} and "loss" not in metrics


def test_the_kl_penalty_on_a_reward_has_its_coefficient(tmp_path):
    """The reference is the policy before its weights are moved; k1 is the sum over trained tokens of their logprobs' difference."""
    algo = Algo(kl_coef=0.5, kl="k1", options=NO_STD)
    batch = Batch(settings(tmp_path, algo=algo))
    of_reference = batch.trainer.score(batch.rows)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in batch.run.model.policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    of_policy = batch.trainer.score(batch.rows)
    pairs = zip(of_policy, of_reference, batch.rows, strict=True)
    kl = [float(((new - old) * row.loss_mask).sum()) for new, old, row in pairs]
    assert np.abs(kl).max() > 0.1
    worth = np.array([number - 0.5 * penalty for number, penalty in enumerate(kl)]).reshape(2, 2)
    expected = (worth - worth.mean(1, keepdims=True)).ravel()
    _, advantages = batch.train()
    assert [advantages[number] for number in range(4)] == pytest.approx(list(expected), abs=1e-4)
