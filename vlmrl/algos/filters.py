"""Group filters, and the treatment of overlong trajectories. Pure functions over finished trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmrl.types import TRUNCATED, Trajectory

EQUAL = 1e-8  # rewards closer than this are the same


def zero_variance(group: Sequence[Trajectory]) -> bool:
    """Keep a group only if its rewards differ: equal rewards have advantage 0. One reward alone is kept, as it equals no other.

    Failed members do not count. Source: DAPO, arXiv 2503.14476, equation 11; a group of one as in its released code.
    """
    rewards = [trajectory.reward for trajectory in group if not trajectory.failed and trajectory.reward is not None]
    return len(rewards) == 1 or (bool(rewards) and max(rewards) - min(rewards) > EQUAL)


def reward_band(group: Sequence[Trajectory], low: float = 0.0, high: float = 1.0) -> bool:
    """Keep a group whose mean reward lies strictly between ``low`` and ``high``: neither impossible nor solved."""
    rewards = [trajectory.reward for trajectory in group if not trajectory.failed and trajectory.reward is not None]
    return bool(rewards) and low < sum(rewards) / len(rewards) < high


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether a length limit cut the trajectory off, so that its reward says little about it. Source: DAPO, section 3.4."""
    return trajectory.ending in TRUNCATED


def soft_overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then linearly down to -1 at ``limit``.

    Length 90 of 100 with a buffer of 20 gives -0.5. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer)) if buffer else 0.0


def best_of(rewards: Sequence[float], count: int) -> list[int]:
    """The places of the ``count`` highest rewards, in order; among equal ones the first: ``best_of([0, 1, 1, 0.5], 2)`` is ``[1, 2]``.

    Source: rejection sampling fine-tuning, as RAFT, arXiv 2304.06767, algorithm 1.
    """
    return sorted(sorted(range(len(rewards)), key=lambda place: -rewards[place])[:count])


FILTERS: dict[str, Callable[..., bool]] = {"zero_variance": zero_variance, "reward_band": reward_band}
