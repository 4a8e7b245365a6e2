"""What corrects for rollouts that older weights sampled: it follows from the settings and from what the loss declares.

The config cannot decide this: the loss, which may be a user's, is only known once the recipe has registered it.
"""

from __future__ import annotations

from typing import Literal

from vlmrl.algos import LOSSES, has_ratio, look_up
from vlmrl.config import Config
from vlmrl.config.fields import require


def old_policy(config: Config) -> Literal["trainer", "rollout"]:
    """``algo.old_policy``, or its default where it is unset.

    A loss that declares nothing also gets rollout logprobs by default: if it has a ratio, they are the right ones.
    """
    algo = config.algo
    able = (
        _loss_has_ratio(config) is not False and not config.rollout.needs_rendered_rows
    )  # which have no rollout logprobs
    wanted = config.train.max_staleness > 0 and not algo.corrections
    return algo.old_policy or ("rollout" if able and wanted else "trainer")


def check_off_policy(config: Config) -> None:
    """Raise ValueError where ``algo.old_policy`` or ``train.too_old`` relies on a ratio that the loss does not have."""
    algo = config.algo
    if algo.old_policy == "rollout":
        rule = "one with a ratio with algo.old_policy rollout, such as ppo"
        require(_loss_has_ratio(config) is not False, "algo.loss", rule, algo.loss)
    if config.train.max_staleness and config.train.too_old == "correct":
        rule = (
            "set with train.too_old correct, such as token_truncation, or algo.old_policy must be rollout and algo.loss "
            f"{algo.loss!r} declared as @vlmrl.algos.loss(has_ratio=True)"
        )
        require(bool(algo.corrections) or _corrected_by_ratio(config), "algo.corrections", rule, algo.corrections)


def describe_correction(config: Config) -> str:
    """One phrase for the plan of a run whose rollouts run ahead of the trainer."""
    algo = config.algo
    if algo.corrections:
        return "corrections: " + ", ".join(algo.corrections)
    if _corrected_by_ratio(config):
        return "corrected by the loss's ratio"
    if old_policy(config) == "rollout":
        return f"not known to be corrected: loss {algo.loss!r} has no @vlmrl.algos.loss(has_ratio=...)"
    return "not corrected"


def _corrected_by_ratio(config: Config) -> bool:
    return old_policy(config) == "rollout" and _loss_has_ratio(config) is True


def _loss_has_ratio(config: Config) -> bool | None:
    return has_ratio(look_up("algo.loss", config.algo.loss, LOSSES))
