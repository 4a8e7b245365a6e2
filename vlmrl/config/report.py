"""Settings of what a run reports, and where."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrl.config.fields import Settings
from vlmrl.utils.require import require


@dataclass(frozen=True)
class Report(Settings):
    """What a run reports besides the metrics in its folder."""

    section = "report"
    to: tuple[str, ...] = ()
    """Trackers that get the metrics, the config, the curve and some trajectories, besides the files in the run's folder:
    `tensorboard`, `wandb`, or `file.py:Class` (see docs/metrics.md)."""
    trajectories: int = 32
    """Of each step and each evaluation, how many trajectories are kept with tokens and images.
    Whole groups are kept, and all failed trajectories besides. The others keep their text."""

    def __post_init__(self) -> None:
        require(self.trajectories >= 0, "report.trajectories", "0 or more", self.trajectories)
