"""How far the trainer's logprobs are from the rollout's, turn by turn: the first place where a mismatch shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmrl.samples.emit import reply_spans
from vlmrl.types import Sample, Trajectory


@dataclass(frozen=True)
class TurnMismatch:
    """Over the ``tokens`` of one reply: mean and largest |trainer - rollout| in nats; k3 estimates KL(rollout || trainer)."""

    trajectory_id: str
    turn: int
    tokens: int
    mean: float
    max: float
    k3: float


def turn_mismatches(
    trajectories: Sequence[Trajectory], samples: Sequence[Sample], logprobs: Sequence[np.ndarray]
) -> list[TurnMismatch]:
    """The gap of each turn that ``samples`` train; ``logprobs`` are the trainer's, one array ``[response]`` for each sample.

    A row without rollout logprobs has none. k3 is the mean of exp(d) - 1 - d, d the trainer's logprob minus the rollout's
    (Schulman, "Approximating KL divergence", 2020).
    """
    rows: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        rows.setdefault(sample.trajectory_id, []).append(index)
    places: list[tuple[str, int]] = []
    differences: list[np.ndarray] = []
    for trajectory in trajectories:
        own = rows.get(trajectory.id, [])
        for span in reply_spans(trajectory, [samples[index] for index in own]):
            if span.end > span.start:
                index, part = own[span.row], slice(span.start, span.end)
                rollout = np.array((samples[index].rollout_logprobs or [])[part])
                places.append((trajectory.id, span.turn))
                differences.append(logprobs[index][part].astype(np.float64) - rollout)
    if not places:
        return []
    sizes = np.array([len(d) for d in differences])
    starts = np.cumsum(sizes) - sizes
    d = np.concatenate(differences)
    mean, k3 = np.add.reduceat(np.abs(d), starts) / sizes, np.add.reduceat(np.expm1(d) - d, starts) / sizes
    numbers = zip(places, sizes, mean, np.maximum.reduceat(np.abs(d), starts), k3, strict=True)
    return [TurnMismatch(name, turn, int(n), float(m), float(top), float(k)) for (name, turn), n, m, top, k in numbers]


def summarise(gaps: Sequence[TurnMismatch]) -> dict[str, float | str]:
    """``logprob_mismatch/mean|max|k3`` over all tokens, and the turn that is ``worst``; nothing where no gap is known."""
    if not gaps:
        return {}
    tokens = sum(gap.tokens for gap in gaps)
    worst = max(gaps, key=lambda gap: gap.max)
    return {
        "logprob_mismatch/mean": sum(gap.mean * gap.tokens for gap in gaps) / tokens,
        "logprob_mismatch/max": worst.max,
        "logprob_mismatch/k3": sum(gap.k3 * gap.tokens for gap in gaps) / tokens,
        "logprob_mismatch/worst": f"{worst.trajectory_id}, turn {worst.turn}",
    }
