"""Progress lines where the console is no terminal."""

from __future__ import annotations

import io

from vlmrl.report import progress
from vlmrl.report.progress import RunProgress
from vlmrl.utils.terminal import Terminal


def test_the_time_left_does_not_count_the_first_unit(monkeypatch):
    """It loads, compiles and fills: the others take 2 s here. A resumed phase counts what it did itself."""
    now, text = 1000.0, io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with RunProgress(Terminal(file=text, soft_wrap=True)).phase("train", 23, done=20) as phase:
        now += 60
        phase.advance(reward=0.5)
        now += 12
        phase.advance()
        now += 8
        phase.advance()
    first, second, last = text.getvalue().splitlines()
    assert first == "train       21/23  reward 0.5"
    assert second == "train       22/23    12 s left"
    assert last == "train       23/23    0 s left"
