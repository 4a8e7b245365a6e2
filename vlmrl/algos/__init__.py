"""The algorithms: pure functions in registries by name. To add one, write a function and register it.

ADVANTAGES[name](rewards, group_ids, **options) -> advantages                one number per trajectory, in and out; with
                                                                             @advantage(per_token=True) one per trained token
LOSSES[name](inputs, **options)                 -> LossOutputs                per token, [rows, length]
CORRECTIONS[name](old, rollout, mask, **options) -> weights, metrics          detached factors, [rows, length]
REDUCTIONS[name](loss_mask, group_ids, **options) -> weights                  [rows, length]; loss = (per_token * weights).sum()
FILTERS[name](group, **options)                 -> bool                       whether a group of trajectories is trained
"""

from typing import Any

from vlmrl.algos.advantages import ADVANTAGES, advantage, is_per_token
from vlmrl.algos.corrections import CORRECTIONS
from vlmrl.algos.filters import FILTERS
from vlmrl.algos.losses import KL, LOSSES, LossInputs, LossOutputs, has_ratio, loss
from vlmrl.algos.reductions import REDUCTIONS

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "FILTERS",
    "KL",
    "LOSSES",
    "REDUCTIONS",
    "LossInputs",
    "LossOutputs",
    "advantage",
    "has_ratio",
    "is_per_token",
    "look_up",
    "loss",
]


def look_up(setting: str, name: str, registry: dict[str, Any]) -> Any:
    """The function registered under ``name``. Raises ValueError that names the ``setting`` and lists the registered names."""
    if name not in registry:
        raise ValueError(f"{setting} must be one of {', '.join(sorted(registry))}, but it is {name!r}.")
    return registry[name]
