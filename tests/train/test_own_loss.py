"""Losses registered from outside the package, trained while rollouts run ahead: what the plan says corrects them."""

from dataclasses import replace

from test_loop import RECIPES, short_quickstart, train

from vlmrl.algos import LOSSES, LossOutputs
from vlmrl.config import Algo, Eval, Optim, Rollout, Train, WarmStart
from vlmrl.run.program import summary_of


def plain(inputs):
    """Half of REINFORCE: it reads no old logprobs."""
    return LossOutputs(-0.5 * inputs.advantages * inputs.logprobs)


def config(tmp_path, loss, **algo):
    return replace(
        short_quickstart(tmp_path),
        rollout=Rollout(group_size=2, max_turns=2, max_tokens=128, max_reply_tokens=16),
        warm_start=WarmStart(),
        algo=Algo(loss=loss, **algo),
        optim=Optim(lr=1e-3),
        train=Train(steps=2, groups_per_batch=2, max_staleness=1, canary=False),
        eval=Eval(),
        save_model=False,
    )


def test_a_loss_without_a_ratio_trains_and_is_not_called_corrected(tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES, "plain", plain)
    run, rows, _ = train(config(tmp_path, "plain"))
    plan = summary_of(run)
    run.engine.close()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert "1 updates ahead" in plan and "corrected by the loss's ratio" not in plan
