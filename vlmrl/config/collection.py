"""The options of `vlmrl collect`: what it plays, and which episodes it writes. They are not settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.utils.require import require


@dataclass(frozen=True)
class Keep:
    """Which episodes are written. ``best`` chooses among those that fulfil all other conditions."""

    min_reward: float | None = None
    """Smallest reward of an episode. Unset: any."""
    max_tokens: int | None = None
    """Largest length of an episode in tokens, prompt and images included. Unset: any."""
    best: int | None = None
    """Episodes of each task: those of the highest rewards, the first ones among equals. 1: one of each task. Unset: all."""
    filters: tuple[str, ...] = ()
    """Filters of a task's whole group, as in `algo.filters`: `reward_band`, `zero_variance` or `file.py:function`."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "best"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--keep.{name.replace('_', '-')}", "positive", value)


@dataclass(frozen=True)
class Collection:
    """What one command collects."""

    out: Path | None = None
    """Folder of the episodes. Unset: `runs/NAME-episodes`."""
    tasks: int | None = None
    """Play only this many tasks, the first ones: of a mixture, those of its first part, then of the next. Unset: all."""
    episodes: int = 1
    """Episodes of each task."""
    retry_failed: bool = False
    """Play episodes again that failed in earlier commands."""
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        require(self.tasks is None or self.tasks > 0, "--tasks", "positive", self.tasks)
        require(self.episodes > 0, "--episodes", "positive", self.episodes)
