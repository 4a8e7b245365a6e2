"""Credit assignment: from rewards to the samples' advantages: one per trajectory, per turn or per token."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlmrl.algos import choose, is_per_token
from vlmrl.algos.filters import soft_overlong_penalty
from vlmrl.config import Algo, Config
from vlmrl.train.token_credit import assign_by_token, checked, checked_turns, trained
from vlmrl.train.turn_states import places_of, rewards_by_place, states_by_place
from vlmrl.types import Sample, Trajectory


def assign_advantages(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    config: Config,
    kl: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """Set every sample's advantage. Returns metrics.

    ``kl``: for each sample the KL of its tokens ``[response]`` in nats (``algo.kl k1``).

    ``algo.credit`` trajectory: one advantage from the whole reward, from which ``algo.kl_coef`` times the KL of its trained tokens is
    subtracted. An advantage per token, such as ``reinforce_pp``, has the KL of its own and later tokens subtracted instead.
    Otherwise one per turn, by a function of :data:`vlmrl.algos.turn_credit.CREDIT` or the user's own.
    """
    algo = config.algo
    if algo.credit != "trajectory":
        _assign_by_turn(samples, trajectories, algo)
        return {} if algo.credit == "turn" else _turns_compared(trajectories)
    per_token = is_per_token(choose(algo, "advantage").func)
    penalties = {} if per_token else _kl_by_trajectory(samples, kl, algo)
    rewards = [shaped_reward(each, config) - penalties.get(each.id, 0.0) for each in trajectories]
    if config.train.shuffle_rewards:
        random.Random(f"{config.seed}/{trajectories[0].id}").shuffle(rewards)
    if per_token:
        assign_by_token(samples, trajectories, rewards, kl, algo)
        return {}
    advantages = _advantages(rewards, [trajectory.group_id for trajectory in trajectories], algo)
    of = {trajectory.id: value for trajectory, value in zip(trajectories, advantages, strict=True)}
    for sample in samples:
        sample.advantage = of[sample.trajectory_id]
    return {}


def shaped_reward(trajectory: Trajectory, config: Config) -> float:
    """The trajectory's reward with the penalty for its length (``algo.overlong_buffer``)."""
    assert trajectory.reward is not None
    buffer = config.algo.overlong_buffer
    if not buffer:
        return trajectory.reward
    return trajectory.reward + soft_overlong_penalty(trajectory.num_tokens, config.rollout.max_tokens, buffer)


def _kl_by_trajectory(samples: Sequence[Sample], kl: Sequence[np.ndarray] | None, algo: Algo) -> Mapping[str, float]:
    total: dict[str, float] = defaultdict(float)
    for sample, values in zip(samples, kl or (), strict=kl is not None):
        total[sample.trajectory_id] += algo.kl_coef * float(values[trained(sample)].sum())
    return total


def _assign_by_turn(samples: Sequence[Sample], trajectories: Sequence[Trajectory], algo: Algo) -> None:
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
        sample.advantage = [0.0] * len(sample.response_ids)
    by_turn = _advantages_by_turn(trajectories, algo)
    for trajectory in trajectories:
        for row in rows[trajectory.id]:
            if not row.responses:
                raise ValueError(
                    f"trajectory {trajectory.id}: a sample does not say where its turns' responses are, as those without rollout "
                    "logprobs: emit it from its trajectory, or set algo.credit to trajectory."
                )
            assert isinstance(row.advantage, list)
            for span in row.responses:
                row.advantage[span.start : span.end] = [by_turn[trajectory.id, span.turn]] * (span.end - span.start)


def _advantages_by_turn(trajectories: Sequence[Trajectory], algo: Algo) -> dict[tuple[str, int], float]:
    """The advantage of each turn by trajectory id and the turn's number."""
    places = [places_of(trajectory) for trajectory in trajectories]
    rewards = [rewards_by_place(trajectory) for trajectory in trajectories]
    states = [states_by_place(trajectory) for trajectory in trajectories]
    group_ids = [trajectory.group_id for trajectory in trajectories]

    def compare(values: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
        return checked(choose(algo, "advantage")(values, groups), values, algo)

    found = checked_turns(choose(algo, "credit")(rewards, states, group_ids, compare), rewards, algo)
    return {
        (trajectory.id, number): row[place]
        for trajectory, row, own in zip(trajectories, found, places, strict=True)
        for number, place in enumerate(own)
    }


def _turns_compared(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of turns that began in a state in which another turn of the group began."""
    names = [(trajectory.group_id, state) for trajectory in trajectories for state in states_by_place(trajectory)]
    company = Counter(names)
    return {"credit/turns_compared": sum(company[name] > 1 for name in names) / max(1, len(names))}


def _advantages(rewards: Sequence[float], group_ids: Sequence[str], algo: Algo) -> list[float]:
    given = torch.tensor(rewards, dtype=torch.float64)
    return checked(choose(algo, "advantage")(given, group_ids), given, algo).tolist()
