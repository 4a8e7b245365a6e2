"""From rewards to the advantage that each sample is trained with: once per trajectory, or once per turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from vlmrl.algos import ADVANTAGES
from vlmrl.algos.filters import soft_overlong_penalty
from vlmrl.config import Algo, Config
from vlmrl.samples.emit import reply_spans
from vlmrl.types import Sample, Trajectory


def give_advantages(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    config: Config,
    penalties: Mapping[str, float] | None = None,
) -> None:
    """Set every sample's advantage. ``penalties`` by trajectory id, such as a KL, are taken off its reward.

    ``algo.credit`` trajectory: one number, from the whole reward. ``turn``: one for each turn, from what is paid from this turn
    on, compared with the same turn of the group's other members.
    """
    if config.algo.credit == "turn":
        _give_by_turn(samples, trajectories, config.algo)
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
    """The trajectory's reward, less what its length costs (``algo.overlong_buffer``)."""
    assert trajectory.reward is not None
    buffer = config.algo.overlong_buffer
    if not buffer:
        return trajectory.reward
    return trajectory.reward + soft_overlong_penalty(trajectory.num_tokens, config.rollout.max_tokens, buffer)


def _give_by_turn(samples: Sequence[Sample], trajectories: Sequence[Trajectory], algo: Algo) -> None:
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
        sample.advantage = [0.0] * len(sample.response_ids)
    places = [(trajectory, turn) for trajectory in trajectories for turn in range(len(trajectory.turns))]
    returns = [paid_from(trajectory, turn) for trajectory, turn in places]
    values = _advantages(returns, [f"{trajectory.group_id}, turn {turn}" for trajectory, turn in places], algo)
    by_turn = {(trajectory.id, turn): value for (trajectory, turn), value in zip(places, values, strict=True)}
    for trajectory in trajectories:
        for span in reply_spans(trajectory, rows[trajectory.id]):
            advantage = rows[trajectory.id][span.row].advantage
            assert isinstance(advantage, list)
            advantage[span.start : span.end] = [by_turn[trajectory.id, span.turn]] * (span.end - span.start)


def paid_from(trajectory: Trajectory, turn: int) -> float:
    """The rewards of this turn and all later ones, the final one and the group's."""
    at_the_end = (trajectory.final_reward, trajectory.group_reward)
    return sum(reward or 0.0 for reward in (*trajectory.turn_rewards[turn:], *at_the_end))


def _advantages(rewards: Sequence[float], group_ids: Sequence[str], algo: Algo) -> list[float]:
    compute = ADVANTAGES[algo.advantage]
    return compute(torch.tensor(rewards, dtype=torch.float64), group_ids, **algo.advantage_options).tolist()
