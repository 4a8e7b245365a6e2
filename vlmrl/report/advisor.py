"""The advisor of a run: prints its advisories, and counts the steps without a learning signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from vlmrl.config import Config
from vlmrl.report.advisories import PAGE, Observed, Record, advisories, compares_groups
from vlmrl.report.run_log import RunLog, read_rows


def idle_steps(rows: Sequence[Record], config: Config) -> int:
    """How many of the last training steps had no learning signal: gradients of 0, or no group whose rewards differ."""
    compares = compares_groups(config) and config.teacher.model is None
    count = 0
    for row in reversed(rows):
        has_equal_groups = compares and row["groups/zero_variance"] == row["groups/played"]
        if row.get("grad_norm") and not has_equal_groups:
            break
        count += 1
    return count


class Advisor:
    """Prints each advisory of a run once, and appends it to ``advisories.jsonl``; also those of before a resume are not repeated."""

    def __init__(self, log: RunLog, config: Config, say: Callable[[str], None]) -> None:
        self._log = log
        self._config = config
        self._say = say
        self._given = {row["name"] for row in read_rows(log.folder / "advisories.jsonl")}
        self._rows, self._evaluations = _by_kind(log.rows())
        self._records: Sequence[Record] = ()

    def after_step(self, row: Record, records: Sequence[Record]) -> None:
        """Judge a step by its row of metrics and its trajectories."""
        self._rows.append(row)
        self._records = records
        self._give()

    @property
    def idle_steps(self) -> int:
        """How many of the last training steps had no learning signal, also over a resume."""
        return idle_steps(self._rows, self._config)

    def after_evaluations(self) -> None:
        """Judge the evaluations that were logged since."""
        self._rows, self._evaluations = _by_kind(self._log.rows())
        self._give()

    def _give(self) -> None:
        seen = Observed(self._config, self._rows, self._records, self._evaluations)
        new = [each for each in advisories(seen) if each.name not in self._given]
        self._given |= {each.name for each in new}
        self._log.append("advisories.jsonl", map(asdict, new))
        for each in new:
            self._say(f"advisory    step {each.step}: {each.message} ({PAGE}#{each.name})")


def _by_kind(rows: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Rows of training steps, and those of evaluations."""
    return [row for row in rows if "trajectories" in row], [row for row in rows if "trajectories" not in row]
