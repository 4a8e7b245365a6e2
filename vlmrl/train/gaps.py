"""How far the trainer's logprobs are from the rollout's, turn by turn: the first place where a mismatch shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmrl.types import Sample


@dataclass(frozen=True)
class TurnGap:
    """Over the ``tokens`` of one reply: mean and largest |trainer - rollout| in nats; k3 estimates KL(rollout || trainer)."""

    trajectory_id: str
    turn: int
    tokens: int
    mean: float
    max: float
    k3: float


def turn_gaps(samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> list[TurnGap]:
    """The gap of each turn in ``samples``, a trajectory's rows in order; ``logprobs`` are the trainer's, ``[response]`` a row.

    A row without rollout logprobs has none. k3 is the mean of exp(d) - 1 - d, d the trainer's logprob minus the rollout's
    (Schulman, "Approximating KL divergence", 2020).
    """
    places: list[tuple[str, int]] = []
    differences: list[np.ndarray] = []
    turns_before = Counter[str]()
    for sample, scored in zip(samples, logprobs, strict=True):
        edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))
        first, count = turns_before[sample.trajectory_id], len(edges) // 2
        turns_before[sample.trajectory_id] += count
        if sample.rollout_logprobs is not None:
            d = scored.astype(np.float64) - np.array(sample.rollout_logprobs)
            places += [(sample.trajectory_id, first + number) for number in range(count)]
            differences += [d[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    if not places:
        return []
    sizes = np.array([len(d) for d in differences])
    starts = np.cumsum(sizes) - sizes
    d = np.concatenate(differences)
    mean, k3 = np.add.reduceat(np.abs(d), starts) / sizes, np.add.reduceat(np.expm1(d) - d, starts) / sizes
    rows = zip(places, sizes, mean, np.maximum.reduceat(np.abs(d), starts), k3, strict=True)
    return [TurnGap(name, turn, int(n), float(m), float(top), float(k)) for (name, turn), n, m, top, k in rows]


def summarise(gaps: Sequence[TurnGap]) -> dict[str, float]:
    """``rollout_gap/mean|max|k3`` over all tokens; nothing where no gap is known."""
    if not gaps:
        return {}
    tokens = sum(gap.tokens for gap in gaps)
    return {
        "rollout_gap/mean": sum(gap.mean * gap.tokens for gap in gaps) / tokens,
        "rollout_gap/max": max(gap.max for gap in gaps),
        "rollout_gap/k3": sum(gap.k3 * gap.tokens for gap in gaps) / tokens,
    }
