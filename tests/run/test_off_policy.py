"""Which policy the loss's ratio is to, and what a run may rely on as a correction for older rollouts."""

import pytest

from vlmrl.algos import LOSSES, LossOutputs, has_ratio, loss
from vlmrl.config import Algo, Config, Rollout, Train
from vlmrl.run.off_policy import check_off_policy, describe_correction, old_policy


def undeclared(inputs):
    return LossOutputs(-inputs.advantages * inputs.logprobs)


@loss(has_ratio=True)
def declared(inputs):
    return LossOutputs(-(inputs.logprobs - inputs.old_logprobs).exp() * inputs.advantages)


def ahead(staleness=1, too_old="wait", rollout=Rollout(), **algo):  # noqa: B008 - it is frozen
    return Config(algo=Algo(**algo), train=Train(max_staleness=staleness, too_old=too_old), rollout=rollout)


def test_the_package_s_losses_declare_their_ratio():
    without = [name for name, function in LOSSES.items() if has_ratio(function) is False]
    assert without == ["reinforce", "sft"]
    assert None not in map(has_ratio, LOSSES.values())


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (ahead(0), "trainer"),
        (ahead(1), "rollout"),
        (ahead(1, corrections=("veto",)), "trainer"),
        (ahead(0, old_policy="rollout"), "rollout"),
        (ahead(1, old_policy="trainer"), "trainer"),
        (ahead(1, loss="reinforce", corrections=("token_truncation",)), "trainer"),
        (ahead(1, loss="sft"), "trainer"),
        (ahead(1, loss="gspo"), "rollout"),
        (ahead(1, loss=undeclared), "rollout"),  # right if it has a ratio, unused if it has none
        (ahead(0, rollout=Rollout(history="rerender")), "trainer"),  # re-rendered rows have no rollout logprobs
    ],
)
def test_ratios_are_to_the_rollout_policy_where_nothing_else_corrects(config, chosen):
    assert old_policy(config) == chosen


@pytest.mark.parametrize(
    ("algo", "phrase"),
    [
        ({"loss": "ppo"}, "corrected by the loss's ratio"),
        ({"loss": declared}, "corrected by the loss's ratio"),
        (
            {"loss": undeclared},
            "not known to be corrected: loss 'undeclared' has no @vlmrl.algos.loss(has_ratio=...)",
        ),
        ({"loss": "reinforce", "old_policy": "trainer"}, "not corrected"),
        ({"loss": "ppo", "old_policy": "trainer"}, "not corrected"),
        ({"loss": "reinforce", "corrections": ("veto", "token_mask")}, "corrections: veto, token_mask"),
    ],
)
def test_the_plan_claims_only_what_the_loss_declares(algo, phrase):
    assert describe_correction(ahead(1, **algo)) == phrase


@pytest.mark.parametrize(
    "config",
    [
        ahead(1, "correct", old_policy="trainer"),
        ahead(1, "correct", loss="reinforce", old_policy="trainer"),
        ahead(1, "correct", loss=undeclared),
        ahead(1, "correct", loss=undeclared, old_policy="rollout"),
    ],
)
def test_too_old_correct_needs_something_that_corrects(config):
    with pytest.raises(ValueError, match=r"algo\.corrections must be set with train\.too_old correct.*has_ratio=True"):
        check_off_policy(config)


@pytest.mark.parametrize(
    "config",
    [
        ahead(1, "correct"),
        ahead(1, "correct", loss=declared),
        ahead(1, "correct", loss="reinforce", corrections=("veto",)),
        ahead(1, loss=undeclared, old_policy="rollout"),
        ahead(0, "correct", loss="reinforce"),
    ],
)
def test_what_corrects_is_accepted(config):
    check_off_policy(config)


@pytest.mark.parametrize("staleness", [1, 4])
def test_older_rollouts_without_a_correction_are_refused_when_the_config_is_made(staleness):
    message = "algo.corrections must be set with algo.loss reinforce and train.max_staleness above 0"
    with pytest.raises(ValueError, match=message):
        ahead(staleness, loss="reinforce")
    with pytest.raises(ValueError, match=r"re-rendered samples .* have no rollout logprobs"):
        ahead(staleness, rollout=Rollout(history="rerender"))


def test_an_own_loss_that_declares_no_ratio_is_refused_before_the_run():
    def mine(inputs):
        return undeclared(inputs)

    loss(has_ratio=False)(mine)
    config = ahead(1, loss=mine)  # not known when the config is made
    with pytest.raises(ValueError, match=r"algo\.corrections must be set with algo\.loss .*mine"):
        check_off_policy(config)
    check_off_policy(ahead(0, loss=mine))


@pytest.mark.parametrize(
    "config",
    [
        ahead(4, loss="reinforce", old_policy="trainer"),
        ahead(4, loss="reinforce", corrections=("veto",)),
        ahead(4, rollout=Rollout(history="rerender"), old_policy="trainer"),
        ahead(4, rollout=Rollout(history="rerender", samples="merged")),
        ahead(4, loss="sft"),
        ahead(0, loss="reinforce", rollout=Rollout(history="rerender")),
    ],
)
def test_older_rollouts_are_trained_as_they_are_only_if_that_is_set(config):
    check_off_policy(config)


def test_the_rollout_policy_needs_a_ratio():
    with pytest.raises(ValueError, match=r"algo\.loss must be one with a ratio with algo\.old_policy rollout"):
        check_off_policy(ahead(0, loss="reinforce", old_policy="rollout"))
