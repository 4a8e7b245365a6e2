"""Losses from outside the package, trained while rollouts run ahead: what the plan says corrects them."""

from dataclasses import replace

import pytest
from testing.runs import short_quickstart, train
from testing.trees import random_rows

from vlmrl.algos import LossOutputs
from vlmrl.config import Algo, Config, Eval, Model, Optim, Rollout, Train, WarmStart
from vlmrl.model.loading import load_model
from vlmrl.run.build import build_run
from vlmrl.run.program import summary_of
from vlmrl.train.trainer import Trainer, TrainerSpec


def plain(inputs):
    """Half of REINFORCE: it reads no old logprobs, and declares nothing."""
    return LossOutputs(-0.5 * inputs.advantages * inputs.logprobs)


def config(tmp_path, function, too_old: str = "wait", **algo) -> Config:
    return replace(
        short_quickstart(tmp_path),
        rollout=Rollout(group_size=2, max_turns=2, max_tokens=128, max_response_tokens=16),
        warm_start=WarmStart(),
        algo=Algo(loss=function, **algo),
        optim=Optim(lr=1e-3),
        train=Train(steps=2, groups_per_batch=2, max_staleness=1, too_old=too_old, image_check=False),
        eval=Eval(),
        save_model=False,
    )


def test_a_loss_without_a_ratio_trains_and_is_not_called_corrected(tmp_path):
    run, rows, _ = train(config(tmp_path, plain))
    plan = summary_of(run)
    run.engine.close()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert "1 update ahead at most; too old: wait; not known to be corrected" in plan
    assert "corrected by the loss's ratio" not in plan
    only_supervised = replace(run, config=replace(run.config, train=replace(run.config.train, steps=0)))
    assert plan.count("\ntraining ") == 1 and not {"training", "rollouts"} & set(summary_of(only_supervised).split())


def test_a_loss_without_a_ratio_cannot_correct_groups_that_are_too_old(tmp_path):
    with pytest.raises(ValueError, match=r"algo\.loss 'plain' declared as"):
        build_run(config(tmp_path, plain, too_old="correct"))


def of_each_row(inputs):
    """A mean, as losses elsewhere return one. With as many rows as tokens each token would get the mean of another row."""
    return LossOutputs((-inputs.advantages * inputs.logprobs).mean(1))


def of_all(inputs):
    return LossOutputs((-inputs.advantages * inputs.logprobs).mean())


def tensor(inputs):
    return -inputs.advantages * inputs.logprobs


def reports(inputs):
    return LossOutputs(-inputs.advantages * inputs.logprobs, {"loss": inputs.logprobs, "tokens": inputs.logprobs})


SHAPE = r"per_token must have the shape of logprobs, \[\d+, \d+\], but it is \["


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (of_each_row, f"of_each_row: {SHAPE}"),
        (of_all, f"of_all: {SHAPE}"),
        (tensor, r"tensor must return LossOutputs\(per_token, metrics\), but it returned a Tensor"),
        (reports, r"reports: metrics must not be called \['loss', 'tokens'\], as the trainer's are"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_by_name(tmp_path, function, rule):
    """A mean would be that of other tokens, and its metrics would take the place of the loss and of the number of tokens."""
    model = load_model(Model(path="tiny:qwen3_vl", device="cpu", dtype="float32"), tmp_path, seed=0)
    rows = [replace(each, advantage=1.0) for each in random_rows(model, 0)]
    spec = TrainerSpec(Algo(loss=function), Optim(), total_steps=1, tokens_per_micro_batch=60)
    with pytest.raises(ValueError, match=rf"algo\.loss {rule}"):
        Trainer(model.policy, spec).step(rows)
