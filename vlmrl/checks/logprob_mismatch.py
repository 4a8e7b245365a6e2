"""The difference between the trainer's and the rollout's logprobs, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlmrl.algos.losses import MAX_LOG_RATIO
from vlmrl.types import Sample, TrainedTokens, Trajectory


@dataclass(frozen=True)
class TurnMismatch:
    """Over the ``tokens`` of one response: mean and maximum of |trainer - rollout| in nats; k3 estimates KL(rollout || trainer)."""

    trajectory_id: str
    turn: int
    tokens: int
    mean: float
    max: float
    k3: float


def turn_mismatches(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], logprobs: Sequence[np.ndarray]
) -> list[TurnMismatch]:
    """The mismatch of each turn in ``samples``; ``logprobs`` are the trainer's, one array ``[response]`` for each sample.

    Samples without rollout logprobs are left out. k3 is the mean of exp(d) - 1 - d, d the trainer's logprob minus the rollout's
    (Schulman, "Approximating KL divergence", 2020), which counts as MAX_LOG_RATIO at most.
    """
    turns: list[tuple[str, int]] = []
    differences: list[np.ndarray] = []
    for trajectory, number, index, part in _responses(trajectories, samples):
        rollout = np.array((samples[index].rollout_logprobs or [])[part])
        turns.append((trajectory.id, number))
        differences.append(logprobs[index][part].astype(np.float64) - rollout)
    if not turns:
        return []
    sizes = np.array([len(d) for d in differences])
    starts = np.cumsum(sizes) - sizes
    d = np.concatenate(differences)
    bounded = np.minimum(d, MAX_LOG_RATIO)  # a server may report any logprob, and a metric must be finite
    mean, k3 = np.add.reduceat(np.abs(d), starts) / sizes, np.add.reduceat(np.expm1(bounded) - bounded, starts) / sizes
    numbers = zip(turns, sizes, mean, np.maximum.reduceat(np.abs(d), starts), k3, strict=True)
    return [TurnMismatch(name, turn, int(n), float(m), float(top), float(k)) for (name, turn), n, m, top, k in numbers]


def record_trained(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    logprobs: Sequence[np.ndarray],
    teacher_logprobs: Sequence[np.ndarray] | None = None,
) -> dict[str, float | str]:
    """Write into each turn its largest mismatch and what trainer and teacher computed for its tokens, for the run's log.

    Returns metrics over all turns; arguments as :func:`turn_mismatches`, after the advantages were assigned.
    """
    for trajectory, number, index, part in _responses(trajectories, samples):
        sample = samples[index]
        length, advantage = part.stop - part.start, sample.advantage
        advantages = advantage[part] if isinstance(advantage, list) else [advantage or 0.0] * length
        theirs = None if teacher_logprobs is None else teacher_logprobs[index][part]
        trained = TrainedTokens(logprobs[index][part], advantages, sample.loss_mask[part], theirs)
        trajectory.turns[number].trained = trained
    mismatches = turn_mismatches(trajectories, samples, logprobs)
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    for mismatch in mismatches:
        by_id[mismatch.trajectory_id].turns[mismatch.turn].logprob_mismatch = mismatch.max
    return summarize(mismatches)


def _responses(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample]
) -> Iterator[tuple[Trajectory, int, int, slice]]:
    """Each trained response: its trajectory, the number of its turn, the index of its sample, and where in the response it is."""
    rows: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        rows.setdefault(sample.trajectory_id, []).append(index)
    for trajectory in trajectories:
        for index in rows.get(trajectory.id, []):
            for span in samples[index].responses:
                if span.end > span.start:
                    yield trajectory, span.turn, index, slice(span.start, span.end)


def summarize(mismatches: Sequence[TurnMismatch]) -> dict[str, float | str]:
    """``logprob_mismatch/mean|max|k3`` over all tokens, and the ``worst`` turn; empty without mismatches."""
    if not mismatches:
        return {}
    tokens = sum(mismatch.tokens for mismatch in mismatches)
    worst = max(mismatches, key=lambda mismatch: mismatch.max)
    return {
        "logprob_mismatch/mean": sum(mismatch.mean * mismatch.tokens for mismatch in mismatches) / tokens,
        "logprob_mismatch/max": worst.max,
        "logprob_mismatch/k3": sum(mismatch.k3 * mismatch.tokens for mismatch in mismatches) / tokens,
        "logprob_mismatch/worst": f"{worst.trajectory_id}, turn {worst.turn}",
    }
