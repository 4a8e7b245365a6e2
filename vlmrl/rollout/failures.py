"""Why trajectories failed: errors of one cause are counted together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlmrl.types import Trajectory

INSTANCE = re.compile(
    r"0x[0-9a-f]+|(?<!HTTP )(?<!Errno )(?<!status )(?<!code )(?<!, line )(?<![0-9A-Za-z_])\d+(?:\.\d+)?"
)
"""What differs between two errors of one cause: addresses, and numbers other than a status, a system error or a line of code."""
SHOWN_REASONS = 3
SHOWN_CHARACTERS = 1000  # of one reason


def failure_reason(trajectory: Trajectory) -> str:
    """Why a trajectory failed, without what belongs to this one only, so that equal reasons can be counted.

    ``"task t/3: step() of <Env object at 0x7f3a> took 61.2 s"`` becomes ``"task ...: step() of <Env object at N> took N s"``.
    """
    reason = failure_of(trajectory)
    for own in (trajectory.id, trajectory.group_id, trajectory.task.id):
        reason = re.sub(rf"(?<![\w/]){re.escape(own)}(?![\w/])", "...", reason) if own else reason
    return INSTANCE.sub("N", reason)


def failure_of(trajectory: Trajectory) -> str:
    """The error of a failed trajectory, or its ending."""
    return trajectory.error or str(trajectory.ending)


def list_reasons(failed: Sequence[Trajectory]) -> str:
    """The commonest reasons, a line each: ``"  2x refused"``, or with the first of several errors that differ in an instance only.

    ``"  3 failures of one kind, such as: row 0 of 'a.jsonl': no image '0.png'"``
    """
    errors: dict[str, list[str]] = {}
    for each in failed:
        errors.setdefault(failure_reason(each), []).append(failure_of(each))
    reasons = sorted(errors.values(), key=len, reverse=True)
    lines = [f"  {_counted(same)}" for same in reasons[:SHOWN_REASONS]]
    if len(reasons) > SHOWN_REASONS:
        lines.append(f"  and {len(reasons) - SHOWN_REASONS} other reasons")
    return "\n".join(lines)


def _counted(errors: Sequence[str]) -> str:
    """The errors of one reason in a line."""
    first = f"{errors[0]:.{SHOWN_CHARACTERS}}"
    if len(set(errors)) == 1:
        return f"{len(errors)}x {first}"
    return f"{len(errors)} failures of one kind, such as: {first}"
