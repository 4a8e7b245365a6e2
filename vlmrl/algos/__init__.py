"""The algorithms: pure functions, registered by name. Adding one is one function and one decorator.

ADVANTAGES[name](rewards, group_ids, **options) -> advantages          one number a trajectory, in and out
LOSSES[name](inputs, **options)                 -> LossOutputs          per token, [rows, length]
REDUCTIONS[name](loss_mask, group_ids)          -> weights              [rows, length]; loss = (per_token * weights).sum()
"""

from vlmrl.algos.advantages import ADVANTAGES
from vlmrl.algos.losses import KL, LOSSES, LossInputs, LossOutputs
from vlmrl.algos.reductions import REDUCTIONS

__all__ = ["ADVANTAGES", "KL", "LOSSES", "REDUCTIONS", "LossInputs", "LossOutputs"]
