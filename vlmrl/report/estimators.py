"""Estimates of an evaluation: pass@k, and means over tasks with their intervals. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist, fmean

import numpy as np

LEVEL = 0.95
"""Of every interval that is reported."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95% interval: ``Estimate(mean=0.5, low=0.4, high=0.6)``."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The probability that at least one of ``k`` samples of a task is solved, of which ``solved`` of ``samples`` are.

    Unbiased: 1 - C(samples - solved, k) / C(samples, k). Source: Chen et al. 2021, arXiv 2107.03374, equation 1. With 4 samples, 1 of
    them solved, pass@2 is 1 - 3/6 = 0.5.

    Raises:
        ValueError: ``k`` is not in 1..samples, or ``solved`` not in 0..samples.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples and 0 <= solved <= samples, got {solved} of {samples}.")
    return 1 - comb(samples - solved, k) / comb(samples, k)


def ks_up_to(samples: int) -> list[int]:
    """The k of pass@k that ``samples`` per task allow: powers of two. 6 gives ``[1, 2, 4]``."""
    return [2**power for power in range(samples.bit_length())]


def normal_interval(mean: float, standard_error: float) -> Estimate:
    """1.96 standard errors on each side of a mean."""
    off = NormalDist().inv_cdf((1 + LEVEL) / 2) * standard_error
    return Estimate(mean, mean - off, mean + off)


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean of ``values``, one for each task, with its percentile bootstrap interval over tasks.

    Draws ``RESAMPLES`` times as many tasks with replacement. The same values and seed give the same interval. Source: Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a bootstrap interval needs at least one task, got none.")
    array, draws = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    means = [array[draws.integers(len(array), size=len(array))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(fmean(values), float(low), float(high))


def paired_difference(values: Mapping[str, float], baseline: Mapping[str, float], seed: int = 0) -> Estimate:
    """The mean of ``values`` minus ``baseline`` over the tasks that both have, with its paired bootstrap interval.

    Tasks are resampled, each with its two values, so that easy and hard tasks do not widen the interval. Both map a task's id to its
    mean reward.

    Raises:
        ValueError: they have no task in common.
    """
    return bootstrap([values[task] - baseline[task] for task in values if task in baseline], seed)
