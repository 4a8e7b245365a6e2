"""Credit assignment: from rewards to the samples' advantages: one per trajectory, per turn or per token."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlmrl.algos import ADVANTAGES, is_per_token
from vlmrl.algos.filters import soft_overlong_penalty
from vlmrl.config import Algo, Config
from vlmrl.samples.emit import reply_spans
from vlmrl.types import Sample, Trajectory


def assign_advantages(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    config: Config,
    kl: Sequence[np.ndarray] | None = None,
) -> None:
    """Set every sample's advantage. ``kl``: for each sample the KL of its tokens ``[response]`` in nats (``algo.kl_in_reward``).

    ``algo.credit`` trajectory: one advantage from the whole reward, from which ``algo.kl_coef`` times the KL of its trained tokens is
    subtracted. An advantage per token, such as ``reinforce_pp``, has the KL of its own and later tokens subtracted instead.
    ``turn``: one per turn, from its return-to-go, with the same turn of the group's other members as the baseline. A turn that no
    other member reached has nothing to be compared with: it has the trajectory's advantage, as in GiGPO, arXiv 2505.10978, where a
    step that no other episode shares has the episode's relative advantage alone. Equal rewards give 0.
    """
    algo = config.algo
    if algo.credit == "turn":
        _assign_by_turn(samples, trajectories, algo)
        return
    per_token = is_per_token(ADVANTAGES[algo.advantage])
    penalties = {} if per_token else _kl_by_trajectory(samples, kl, algo)
    rewards = [shaped_reward(each, config) - penalties.get(each.id, 0.0) for each in trajectories]
    if config.train.shuffle_rewards:
        random.Random(f"{config.seed}/{trajectories[0].id}").shuffle(rewards)
    if per_token:
        _assign_by_token(samples, trajectories, rewards, kl, algo)
        return
    values = _advantages(rewards, [trajectory.group_id for trajectory in trajectories], algo)
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


def _kl_by_trajectory(samples: Sequence[Sample], kl: Sequence[np.ndarray] | None, algo: Algo) -> Mapping[str, float]:
    total: dict[str, float] = defaultdict(float)
    for sample, values in zip(samples, kl or (), strict=kl is not None):
        total[sample.trajectory_id] += algo.kl_coef * float(values[_trained(sample)].sum())
    return total


def _assign_by_token(
    samples: Sequence[Sample],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    kl: Sequence[np.ndarray] | None,
    algo: Algo,
) -> None:
    """Advantages of a function per token, which gets each trajectory's trained tokens in the order of its samples."""
    places = {trajectory.id: row for row, trajectory in enumerate(trajectories)}
    trained = [_trained(sample) for sample in samples]
    lengths = Counter[int]()
    for sample, indices in zip(samples, trained, strict=True):
        lengths[places[sample.trajectory_id]] += len(indices)
    width = max([1, *lengths.values()])
    penalties, mask = torch.zeros(2, len(trajectories), width, dtype=torch.float64)
    filled = Counter[int]()
    spans = []
    for number, (sample, indices) in enumerate(zip(samples, trained, strict=True)):
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
    advantages = _finite(ADVANTAGES[algo.advantage](returns, group_ids, mask, **algo.advantage_options), rewards, algo)
    for sample, indices, place in zip(samples, trained, spans, strict=True):
        values = np.zeros(len(sample.response_ids))
        values[indices] = advantages[place].numpy()
        sample.advantage = values.tolist()


def _trained(sample: Sample) -> np.ndarray:
    """The indices of the sample's trained response tokens."""
    return np.flatnonzero(sample.loss_mask)


def _assign_by_turn(samples: Sequence[Sample], trajectories: Sequence[Trajectory], algo: Algo) -> None:
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
        sample.advantage = [0.0] * len(sample.response_ids)
    by_turn = _advantages_by_turn(trajectories, algo)
    for trajectory in trajectories:
        spans = reply_spans(trajectory, rows[trajectory.id])
        if not spans:
            raise ValueError(
                f"trajectory {trajectory.id}: a sample has no rollout_logprobs, without which its turns' replies are not found: give "
                "them, or set algo.credit to trajectory."
            )
        for span in spans:
            advantage = rows[trajectory.id][span.row].advantage
            assert isinstance(advantage, list)
            advantage[span.start : span.end] = [by_turn[trajectory.id, span.turn]] * (span.end - span.start)


def _advantages_by_turn(trajectories: Sequence[Trajectory], algo: Algo) -> dict[tuple[str, int], float]:
    """The advantage of each turn by trajectory id and the turn's number."""
    group_ids = [trajectory.group_id for trajectory in trajectories]
    whole = _advantages([return_to_go(trajectory, 0) for trajectory in trajectories], group_ids, algo)
    turns = [(place, turn) for place, trajectory in enumerate(trajectories) for turn in range(len(trajectory.turns))]
    reached = [f"{group_ids[place]}, turn {turn}" for place, turn in turns]
    values = _advantages([return_to_go(trajectories[place], turn) for place, turn in turns], reached, algo)
    members, reaching = Counter(group_ids), Counter(reached)
    advantages = {}
    for (place, turn), name, value in zip(turns, reached, values, strict=True):
        is_alone = reaching[name] == 1 and members[group_ids[place]] > 1
        advantages[trajectories[place].id, turn] = whole[place] if is_alone else value
    return advantages


def return_to_go(trajectory: Trajectory, turn: int) -> float:
    """The rewards of this turn and all later turns, with the final reward and the group reward."""
    at_the_end = (trajectory.final_reward, trajectory.group_reward)
    return sum(reward or 0.0 for reward in (*trajectory.turn_rewards[turn:], *at_the_end))


def _advantages(rewards: Sequence[float], group_ids: Sequence[str], algo: Algo) -> list[float]:
    compute = ADVANTAGES[algo.advantage]
    values = compute(torch.tensor(rewards, dtype=torch.float64), group_ids, **algo.advantage_options)
    return _finite(values, rewards, algo).tolist()


def _finite(advantages: torch.Tensor, rewards: Sequence[float], algo: Algo) -> torch.Tensor:
    """The advantages. Raises ValueError if one is not finite, which would only show in the gradient."""
    if not bool(advantages.isfinite().all()):
        raise ValueError(
            f"algo.advantage {algo.advantage} must give finite advantages, but one is not, for rewards from {min(rewards)} to "
            f"{max(rewards)}: give rewards of moderate size."
        )
    return advantages
