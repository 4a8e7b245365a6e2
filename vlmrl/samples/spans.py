"""Where each turn's reply stands in the rows that were emitted of its trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlmrl.types import Sample, Trajectory


@dataclass(frozen=True)
class Span:
    """Turn ``turn``'s reply is ``rows[row].response_ids[start:end]``."""

    turn: int
    row: int
    start: int
    end: int


def reply_spans(trajectory: Trajectory, rows: Sequence[Sample]) -> list[Span]:
    """One span a turn, for audited rows; none for rows that were rendered anew, whose tokens are no turn's.

    Replies ``[5, 6]`` and ``[8]`` in the response ``[5, 6, 7, 8]`` stand at 0 to 2 and 3 to 4.
    """
    if any(row.rollout_logprobs is None for row in rows):
        return []
    spans: list[Span] = []
    turns = trajectory.turns
    for number, row in enumerate(rows):
        place, is_first = 0, True
        while len(spans) < len(turns) and (is_first or place < len(row.response_ids)):
            turn = turns[len(spans)]
            if not is_first:
                place += len(turn.prompt_ids)
            length, is_first = len(turn.response_ids), False
            if turn.dropped and row.response_ids[place : place + length] != turn.response_ids:
                length -= turn.dropped
            spans.append(Span(len(spans), number, place, place + length))
            place += length
    return spans
