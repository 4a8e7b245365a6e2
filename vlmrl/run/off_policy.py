"""Off-policy correction: the baseline of the log-ratio, and whether rollouts under older weights are corrected.

The config alone cannot decide this: only the loss itself, which may be the user's, declares whether it has a ratio.
"""

from __future__ import annotations

from typing import Literal

from vlmrl.algos import choose, has_ratio
from vlmrl.config import Config
from vlmrl.config.checks import check_corrected
from vlmrl.config.fields import short_name
from vlmrl.utils.require import require


def old_policy(config: Config) -> Literal["trainer", "rollout"]:
    """``algo.old_policy``, or its default.

    A loss without a declaration also gets rollout logprobs by default: they are right if it has a ratio.
    """
    algo = config.algo
    has_rollout_logprobs = not config.rollout.needs_rendered_rows
    able = _loss_has_ratio(config) is not False and has_rollout_logprobs
    wanted = config.train.max_staleness > 0 and not algo.corrections
    return algo.old_policy or ("rollout" if able and wanted else "trainer")


def check_off_policy(config: Config) -> None:
    """Raises ValueError if ``algo.old_policy`` or ``train`` needs a ratio that the loss does not have."""
    algo = config.algo
    if algo.old_policy == "rollout":
        rule = "one with a ratio with algo.old_policy rollout, such as ppo"
        require(_loss_has_ratio(config) is not False, "algo.loss", rule, short_name(algo.loss))
    if config.train.max_staleness and config.train.too_old == "correct":
        rule = (
            "set with train.too_old correct, such as token_truncation, or algo.old_policy must be rollout and algo.loss "
            f"{short_name(algo.loss)!r} declared as @vlmrl.algos.loss(has_ratio=True)"
        )
        require(bool(algo.corrections) or _corrected_by_ratio(config), "algo.corrections", rule, algo.corrections)
    check_corrected(algo, config.rollout, config.train, _loss_has_ratio(config))


def describe_correction(config: Config) -> str:
    """The correction of an asynchronous run, as a phrase for its plan."""
    algo = config.algo
    if algo.corrections:
        return "corrections: " + ", ".join(map(short_name, algo.corrections))
    if _corrected_by_ratio(config):
        return "corrected by the loss's ratio"
    if old_policy(config) == "rollout":
        return f"not known to be corrected: loss {short_name(algo.loss)!r} has no @vlmrl.algos.loss(has_ratio=...)"
    return "not corrected"


def _corrected_by_ratio(config: Config) -> bool:
    return old_policy(config) == "rollout" and _loss_has_ratio(config) is True


def _loss_has_ratio(config: Config) -> bool | None:
    return has_ratio(choose(config.algo, "loss").func)
