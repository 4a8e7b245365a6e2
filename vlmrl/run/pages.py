"""The reward curve in a run's folder, which follows the run while it goes, and the run's page, written at its end."""

from __future__ import annotations

import asyncio
import functools
import time

from vlmrl.report.curve import draw_curve
from vlmrl.report.run_log import RunLog
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.snapshot import PAGE, write_snapshot
from vlmrl.run.build import Run
from vlmrl.utils.threads import DaemonPool

LEAST_PAUSE = 30.0  # seconds between two updates
MOST_OF_TIME = 0.01  # an update waits until the last one's CPU time is less of the time since


@functools.cache
def drawing_thread() -> DaemonPool:
    """One thread for all runs of the process: matplotlib opens its fonts again for each thread that draws, and keeps them open."""
    return DaemonPool("pages")


class Pages:
    """Draws ``reward.png`` in a thread, at most every 30 s and with at most 1% of the time, and writes the page at the end."""

    def __init__(self, run: Run, log: RunLog) -> None:
        self._config = run.config
        self._log = log
        self._due = time.monotonic() + LEAST_PAUSE
        self._drawing: asyncio.Future[bool] | None = None

    def update_if_due(self) -> None:
        """Begin to draw the curve, unless that was done a short time ago. Raises the error of the last update."""
        if self._drawing is not None and not self._drawing.done():
            return
        if time.monotonic() >= self._due:
            if self._drawing is not None:
                self._drawing.result()
            self._drawing = asyncio.ensure_future(drawing_thread().run(self._draw))

    async def finish(self) -> None:
        """Draw the curve, and write the page of `vlmrl view`, with everything that was logged."""
        if self._drawing is not None:
            await self._drawing
        if await drawing_thread().run(self._draw):
            folder = self._config.folder
            await asyncio.to_thread(write_snapshot, [FollowedRun(folder)], folder / PAGE, self._config.name)

    def _draw(self) -> bool:
        """Draw the curve. Returns whether anything was logged."""
        began, rows, chance = time.thread_time(), self._log.rows(), self._config.eval.chance
        if any({"reward/mean", "eval/reward/mean"} & row.keys() for row in rows):  # supervised steps alone have none
            levels = {} if chance is None else {"chance": chance}
            draw_curve(rows, self._config.folder / "reward.png", title=self._config.name, levels=levels)
        self._due = time.monotonic() + max(LEAST_PAUSE, (time.thread_time() - began) / MOST_OF_TIME)
        return bool(rows)
