"""bfloat16 on the CPU: trees score and train as single rows do, and a run learns."""

from statistics import fmean

import numpy as np
import pytest
import torch
from testing.runs import train as train_run
from testing.trees import random_rows

from vlmrl import Config, Data, Model, Optim, Rollout, Train
from vlmrl.config import Algo
from vlmrl.model import tiny
from vlmrl.model.loading import load_model
from vlmrl.train.trainer import Trainer, TrainerSpec


def step(folder, dtype, rows, budget, share):
    """The logprobs of a step, and the gradient of all weights as one vector."""
    model = load_model(Model(path=str(folder), device="cpu", dtype=dtype), folder.parent, seed=0)
    spec = TrainerSpec(Algo(loss="reinforce"), Optim(), 1, tokens_per_micro_batch=budget, share_prefixes=share)
    trainer = Trainer(model.policy, spec)
    trainer._apply_gradient = dict  # keep the gradient
    logprobs = trainer.step(rows).logprobs
    gradients = [weight.grad.flatten() for weight in trainer._weights.parameters if weight.grad is not None]
    assert {each.dtype for each in gradients} == {torch.float32}
    return logprobs, torch.cat(gradients)


def differences(ones, others):
    return np.concatenate([np.abs(one - other) for one, other in zip(ones, others, strict=True)])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3"])
def test_trees_in_bfloat16_score_and_train_as_single_rows_do(family, tmp_path):
    folder = tiny.build(tmp_path / family, family)
    exact = load_model(Model(path=str(folder), device="cpu"), tmp_path, seed=0)
    rows = random_rows(exact, 3, trained=0.7)
    tree, tree_gradient = step(folder, "bfloat16", rows, 10**6, True)
    alone, alone_gradient = step(folder, "bfloat16", rows, 1, False)
    wanted, gradient = step(folder, "float32", rows, 1, False)
    between = differences(tree, alone)
    assert between.mean() < 2e-3 and between.max() < 2e-2  # measured: at most 8e-4 and 5e-3
    assert differences(tree, wanted).mean() < 1.5 * differences(alone, wanted).mean()
    for other in (tree_gradient, alone_gradient):
        assert torch.cosine_similarity(other, gradient, 0) > 0.999


TASKS = """
import random

from PIL import Image


def make(index, seed):
    color = tuple(random.Random(index).randrange(256) for _ in range(3))
    text = {"type": "text", "text": f"Write {index % 7}."}
    return {
        "prompt": [{"role": "user", "content": [{"type": "image"}, text]}],
        "images": [Image.new("RGB", (64, 64), color)],
    }


def digits(text, task):
    return min(1.0, sum(letter.isdigit() for letter in text) / 8)
"""


@pytest.mark.slow
def test_a_run_in_bfloat16_learns_and_its_engine_samples_what_is_trained(tmp_path):
    """The reward is for digits in the response; an untrained model writes few."""
    (tmp_path / "tasks.py").write_text(TASKS)
    config = Config(
        name="bfloat16",
        model=Model(path="tiny:qwen3_vl", device="cpu", dtype="bfloat16"),
        data=Data(generator=f"{tmp_path / 'tasks.py'}:make", size=256),
        reward=f"{tmp_path / 'tasks.py'}:digits",
        rollout=Rollout(group_size=8, max_turns=1, max_tokens=128, max_response_tokens=16),
        optim=Optim(lr=1e-3),
        train=Train(steps=20, groups_per_batch=4),
        output_dir=str(tmp_path / "runs"),
        save_model=False,
    )
    run, rows, _ = train_run(config)
    assert run.model.policy.dtype == torch.bfloat16
    steps = [row for row in rows if "logprob_mismatch/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    assert len(steps) == 20
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.15
    assert max(row["logprob_mismatch/mean"] for row in steps) < 5e-3
