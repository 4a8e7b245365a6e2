"""Runs each tracker in its own thread, so that a slow or failing tracker neither slows nor stops the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vlmrl.report.trackers.base import Number, Status, TableRow, Tracker
from vlmrl.types import Trajectory

TABLE_ROWS = 8  # trajectories in a table
QUEUED = 256  # calls that wait for a slow tracker at most; later ones are dropped
CLOSE_SECONDS = 60.0  # for all trackers to send what waits, at the end
STOPPED_SECONDS = 5.0  # of a run that was stopped: a scheduler may be about to kill it

Say = Callable[[str], None]
Call = Callable[[Tracker], None]


class Trackers:
    """All trackers of a run: ``Trackers({"wandb": tracker}, Path("runs/geo3k"), table_every=10)``.

    Each row of metrics goes to all of them, and the first 8 trajectories of each evaluation and of every ``table_every``-th step.
    A resumed run sends the steps since its checkpoint again. ``say`` prints a line.
    """

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path, table_every: int = 10, say: Say = print) -> None:
        self._folder = folder
        self._table_every = table_every
        self.earlier_steps = 0
        """Of the run's stages that have ended: the steps that trackers get rise over all stages."""
        self._threads = [TrackerThread(name, tracker, say) for name, tracker in trackers.items()]

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """One row of metrics. Returns at once."""
        shown = self.earlier_steps + step
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log(shown, dict(values)))  # its own, which it may change

    def log_trajectories(self, step: int, kind: str, trajectories: Sequence[Trajectory]) -> None:
        """The trajectories of a step or an evaluation. Returns at once: images are decoded in the trackers' threads."""
        due = kind != "train" or step == 1 or step % self._table_every == 0
        shown = list(trajectories[:TABLE_ROWS]) if due else []
        place = self.earlier_steps + step
        if not shown:
            return

        def send(tracker: Tracker) -> None:
            tracker.log_trajectories(place, kind, [TableRow.of(place, kind, each) for each in shown])

        for thread in self._threads:
            thread.put(send)

    def close(self, status: Status) -> None:
        """Send what waits, the curve included, and close all, within a minute; within 5 seconds if the run was stopped."""
        curve = self._folder / "reward.png"
        for thread in self._threads:
            thread.finish(status, curve)
        until = time.monotonic() + (STOPPED_SECONDS if status == "stopped" else CLOSE_SECONDS)
        for thread in self._threads:
            thread.join(until - time.monotonic())


class TrackerThread:
    """Calls one tracker, in order. The first error is said; later calls are tried all the same, since a network may come back."""

    def __init__(self, name: str, tracker: Tracker, say: Say) -> None:
        self._name = name
        self._tracker = tracker
        self._say = say
        self._had_errors = False
        self._queue: queue.Queue[Call | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=f"vlmrl-tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Call the tracker later."""
        if self._queue.qsize() >= QUEUED:
            self._complain(f"is slower than the run: {QUEUED} calls wait, and what comes now is left out")
            return
        self._queue.put(call)

    def finish(self, status: Status, curve: Path) -> None:
        """Close the tracker after what waits."""

        def close(tracker: Tracker) -> None:
            try:
                if curve.exists():
                    tracker.log_image("reward", curve)
            finally:
                tracker.close(status)

        self._queue.put(close)
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._say(f"tracker {self._name} is still sending; the run ends without it. {self._tracker.remedy}")

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call(self._tracker)
            except BaseException as error:  # a library that exits must not end the thread unsaid
                self._complain(f"failed: {type(error).__name__}: {error}")

    def _complain(self, what: str) -> None:
        if not self._had_errors:
            self._had_errors = True
            self._say(f"tracker {self._name} {what:.500}; the run goes on. {self._tracker.remedy}")
