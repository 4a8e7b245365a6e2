"""The teacher that is an average of the policy: its numbers, and a resume that goes on with the same bits."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from testing.trees import random_rows

from vlmrl.config import Algo, Config, Model, Optim, Teacher
from vlmrl.model.loading import load_model
from vlmrl.run.checkpointing import LoopState
from vlmrl.run.run_folder import check_resume
from vlmrl.train.checkpoint import random_state, save_json, save_random
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import ResponseSpan

SPEC = TrainerSpec(
    Algo(loss="reinforce"), Optim(lr=1e-3), 4, 400, teacher=Teacher(model="average", decay=0.9, coef=0.5)
)


def new_trainer(folder, dtype="float32"):
    model = load_model(Model(path=str(folder), device="cpu", dtype=dtype), folder.parent, seed=0)
    return model, Trainer(model.policy, SPEC, teacher=model.policy.frozen_copy())


def tensors(trainer):
    return {name: tensor.clone() for name, tensor in trainer._tensors().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_average_is_that_of_an_uninterrupted_run(qwen3_vl, tmp_path, dtype):
    model, whole = new_trainer(qwen3_vl, dtype)
    rows = random_rows(model, seed=0)
    begin = tensors(whole)
    whole.step(rows)
    first = tensors(whole)
    name = next(name for name in first if name.startswith("teacher/") and not torch.equal(begin[name], first[name]))
    weight = name.replace("teacher/", "weight/")
    assert torch.allclose(first[name], 0.9 * begin[weight] + 0.1 * first[weight], atol=1e-7)
    whole.save(tmp_path)
    wanted = whole.step(rows).metrics
    assert wanted["teacher/divergence"] > 0 and wanted["teacher/agreement"] <= 1
    _, resumed = new_trainer(qwen3_vl, dtype)
    resumed.restore(tmp_path)
    assert resumed.step(rows).metrics == wanted
    after, expected = tensors(resumed), tensors(whole)
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_a_checkpoint_with_an_average_is_resumed_by_the_settings_that_made_it(qwen3_vl, tmp_path):
    new_trainer(qwen3_vl)[1].save(tmp_path)
    save_random(tmp_path, "driver", random_state())
    save_json(tmp_path, asdict(LoopState(batches={"tasks": {"drawn": 0, "too_long": 0}})))
    config = Config(model=Model(path=str(qwen3_vl), device="cpu"), output_dir=str(tmp_path), teacher=SPEC.teacher)
    assert check_resume(config, tmp_path) == {}
    with pytest.raises(ValueError, match=r"such as 'teacher/.*model\.freeze, teacher\.model"):
        check_resume(replace(config, teacher=Teacher()), tmp_path)


def test_mini_batches_may_have_different_turns(qwen3_vl):
    """Group a has two turns, and group b one."""
    model, _ = new_trainer(qwen3_vl)
    spec = replace(SPEC, groups_per_step=1)
    rows = random_rows(model, seed=0)
    for row in rows:
        row.responses = [ResponseSpan(0, 0, 1), ResponseSpan(int(row.group_id == "a"), 1, len(row.response_ids))]
    metrics = Trainer(model.policy, spec, teacher=model.policy.frozen_copy()).step(rows).metrics
    assert {name for name in metrics if "turn" in name} == {"teacher/kl_turn_0", "teacher/kl_turn_1"}


def test_a_micro_batch_about_which_the_teacher_says_nothing_is_trained(qwen3_vl):
    """`teacher.sees` returned None for each turn of group b."""
    model, _ = new_trainer(qwen3_vl)
    rows = random_rows(model, seed=0)
    for row in rows:
        row.responses = [ResponseSpan(0, 0, len(row.response_ids))]
        row.teacher_rows = [None] if row.group_id == "b" else []
    trainer = Trainer(model.policy, replace(SPEC, groups_per_step=1), teacher=model.policy.frozen_copy())
    output = trainer.step(rows)
    assert output.steps_done == 2 and 0 < output.metrics["teacher/share"] < 1
    for row, logprobs in zip(rows, output.teacher_logprobs, strict=True):
        assert bool(torch.tensor(logprobs).isnan().all()) == (row.group_id == "b")
