"""The algorithms: pure functions in registries by name. Adding one is writing one function and naming it.

ADVANTAGES[name](rewards, group_ids, **options) -> advantages                one number a trajectory, in and out
LOSSES[name](inputs, **options)                 -> LossOutputs                per token, [rows, length]
CORRECTIONS[name](old, rollout, mask, **options) -> weights, metrics          detached factors, [rows, length]
REDUCTIONS[name](loss_mask, group_ids, **options) -> weights                  [rows, length]; loss = (per_token * weights).sum()
FILTERS[name](group, **options)                 -> bool                       whether a group of trajectories is trained
"""

from vlmrl.algos.advantages import ADVANTAGES
from vlmrl.algos.corrections import CORRECTIONS
from vlmrl.algos.filters import FILTERS
from vlmrl.algos.losses import KL, LOSSES, LossInputs, LossOutputs
from vlmrl.algos.reductions import REDUCTIONS

__all__ = ["ADVANTAGES", "CORRECTIONS", "FILTERS", "KL", "LOSSES", "REDUCTIONS", "LossInputs", "LossOutputs"]
