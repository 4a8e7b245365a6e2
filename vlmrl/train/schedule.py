"""The learning-rate schedule."""

from __future__ import annotations

import math

from vlmrl.config import Optim


def learning_rate_factor(optim: Optim, step: int, total_steps: int, position: int | None = None) -> float:
    """The factor on ``optim.lr`` at optimizer step ``step``, counted from 0.

    ``position``: the step's place in the schedule, after ``step`` if steps were left out; ``None``: ``step``. The warmup counts the
    steps that were taken, the decay the position.
    """
    warmup = (step + 1) / (optim.warmup_steps + 1) if step < optim.warmup_steps else 1.0
    place = step if position is None else position
    done = min(1.0, max(0.0, (place - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)))
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]
    return min(warmup, decay)
