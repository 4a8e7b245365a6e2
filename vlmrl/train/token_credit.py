"""Advantages of tokens: the rows that a function per token gets, and the check of its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from vlmrl.algos import choose
from vlmrl.config import Algo
from vlmrl.config.fields import short_name
from vlmrl.types import Sample, Trajectory


def assign_by_token(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    kl: Sequence[np.ndarray] | None,
    algo: Algo,
) -> None:
    """Advantages of a function per token, which gets each trajectory's trained tokens in the order of its samples."""
    places = {trajectory.id: row for row, trajectory in enumerate(trajectories)}
    indices_of = [trained(sample) for sample in samples]
    lengths = Counter[int]()
    for sample, indices in zip(samples, indices_of, strict=True):
        lengths[places[sample.trajectory_id]] += len(indices)
    width = max([1, *lengths.values()])
    penalties, mask = torch.zeros(2, len(trajectories), width, dtype=torch.float64)
    filled = Counter[int]()
    spans = []
    for number, (sample, indices) in enumerate(zip(samples, indices_of, strict=True)):
        row = places[sample.trajectory_id]
        span = slice(filled[row], filled[row] + len(indices))
        if kl is not None:
            penalties[row, span] = algo.kl_coef * torch.from_numpy(kl[number][indices]).double()
        mask[row, span] = 1
        filled[row] = span.stop
        spans.append((row, span))
    to_go = penalties.flip(1).cumsum(1).flip(1)
    returns = torch.tensor(rewards, dtype=torch.float64)[:, None] - to_go
    group_ids = [trajectory.group_id for trajectory in trajectories]
    advantages = checked(choose(algo, "advantage")(returns, group_ids, mask), returns, algo)
    for sample, indices, place in zip(samples, indices_of, spans, strict=True):
        values = np.zeros(len(sample.response_ids))
        values[indices] = advantages[place].numpy()
        sample.advantage = values.tolist()


def trained(sample: Sample) -> np.ndarray:
    """The indices of the sample's trained response tokens."""
    return np.flatnonzero(sample.loss_mask)


def checked(advantages: torch.Tensor, rewards: torch.Tensor, algo: Algo) -> torch.Tensor:
    """The advantages. Raises ValueError unless there is a finite one for each reward: others would only show in the gradient."""
    name = short_name(algo.advantage)
    is_tensor = isinstance(advantages, torch.Tensor)
    if not is_tensor or advantages.shape != rewards.shape:
        given = f"one of shape {list(advantages.shape)}" if is_tensor else f"a {type(advantages).__name__}"
        rule = f"a tensor of the rewards' shape {list(rewards.shape)}"
        raise ValueError(f"algo.advantage {name} must return {rule}, but it returned {given}.")
    if not bool(advantages.isfinite().all()):
        raise ValueError(
            f"algo.advantage {name} must give finite advantages, but one is not, for rewards from {float(rewards.min())} to "
            f"{float(rewards.max())}: give rewards of moderate size."
        )
    return advantages


def checked_turns(
    advantages: Sequence[Sequence[float]], rewards: Sequence[Sequence[float]], algo: Algo
) -> Sequence[Sequence[float]]:
    """The advantages of turns. Raises ValueError unless there is a finite one for each reward of a turn."""
    name = f"algo.credit {short_name(algo.credit)}"
    try:
        fits = [len(row) for row in advantages] == [len(row) for row in rewards]
    except TypeError:  # of what is no list of lists
        fits = False
    if not fits:
        rule = "a list for each trajectory, of a number for each turn"
        raise ValueError(f"{name} must return {rule}, but it returned {advantages!r:.200}.")
    if not all(math.isfinite(value) for row in advantages for value in row):
        raise ValueError(f"{name} must give finite advantages, but one is not: give rewards of moderate size.")
    return advantages
