"""The algorithms: pure functions, built in by name or your own as ``file.py:function``.

advantage(rewards, group_ids, **options)    -> advantages         one number per trajectory, in and out; with
                                                                  @advantage(per_token=True) one per trained token
credit(rewards, states, group_ids, advantage, **options) -> advantages
                                                                  one list per trajectory, of one number per turn
loss(inputs, **options)                     -> LossOutputs        per token, [rows, length]; declared with @loss(has_ratio=...)
correction(old, rollout, mask, **options)   -> weights, metrics   detached factors, [rows, length]
reduction(loss_mask, group_ids, **options)  -> weights            [rows, length]; loss = (per_token * weights).sum()
filter(group, **options)                    -> bool               whether a group of trajectories is trained
"""

from vlmrl.algos.advantages import ADVANTAGES, advantage, is_per_token
from vlmrl.algos.choose import choose, choose_all
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
    "choose",
    "choose_all",
    "has_ratio",
    "is_per_token",
    "loss",
]
