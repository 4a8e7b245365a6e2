"""Credit assignment: from rewards to the samples' advantages, one per trajectory or one per turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from vlmrl.algos import ADVANTAGES
from vlmrl.algos.filters import soft_overlong_penalty
from vlmrl.config import Algo, Config
from vlmrl.samples.emit import reply_spans
from vlmrl.types import Sample, Trajectory


def assign_advantages(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    config: Config,
    penalties: Mapping[str, float] | None = None,
) -> None:
    """Set every sample's advantage. ``penalties`` by trajectory id, such as a KL, are subtracted from the rewards.

    ``algo.credit`` trajectory: one advantage from the whole reward. ``turn``: one per turn, from its return-to-go, with the same turn
    of the group's other members as the baseline.
    """
    if config.algo.credit == "turn":
        _assign_by_turn(samples, trajectories, config.algo)
        return
    rewards = [
        shaped_reward(trajectory, config) - (penalties or {}).get(trajectory.id, 0.0) for trajectory in trajectories
    ]
    if config.train.shuffle_rewards:
        random.Random(f"{config.seed}/{trajectories[0].id}").shuffle(rewards)
    values = _advantages(rewards, [trajectory.group_id for trajectory in trajectories], config.algo)
    of = {trajectory.id: value for trajectory, value in zip(trajectories, values, strict=True)}
    for sample in samples:
        sample.advantage = of[sample.trajectory_id]


def shaped_reward(trajectory: Trajectory, config: Config) -> float:
    """The trajectory's reward with the penalty for its length (``algo.overlong_buffer``)."""
    assert trajectory.reward is not None
    buffer = config.algo.overlong_buffer
    if not buffer:
        return trajectory.reward
    return trajectory.reward + soft_overlong_penalty(trajectory.num_tokens, config.rollout.max_tokens, buffer)


def _assign_by_turn(samples: Sequence[Sample], trajectories: Sequence[Trajectory], algo: Algo) -> None:
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
        sample.advantage = [0.0] * len(sample.response_ids)
    turns = [(trajectory, turn) for trajectory in trajectories for turn in range(len(trajectory.turns))]
    returns = [return_to_go(trajectory, turn) for trajectory, turn in turns]
    values = _advantages(returns, [f"{trajectory.group_id}, turn {turn}" for trajectory, turn in turns], algo)
    by_turn = {(trajectory.id, turn): value for (trajectory, turn), value in zip(turns, values, strict=True)}
    for trajectory in trajectories:
        for span in reply_spans(trajectory, rows[trajectory.id]):
            advantage = rows[trajectory.id][span.row].advantage
            assert isinstance(advantage, list)
            advantage[span.start : span.end] = [by_turn[trajectory.id, span.turn]] * (span.end - span.start)


def return_to_go(trajectory: Trajectory, turn: int) -> float:
    """The rewards of this turn and all later turns, with the final reward and the group reward."""
    at_the_end = (trajectory.final_reward, trajectory.group_reward)
    return sum(reward or 0.0 for reward in (*trajectory.turn_rewards[turn:], *at_the_end))


def _advantages(rewards: Sequence[float], group_ids: Sequence[str], algo: Algo) -> list[float]:
    compute = ADVANTAGES[algo.advantage]
    return compute(torch.tensor(rewards, dtype=torch.float64), group_ids, **algo.advantage_options).tolist()
