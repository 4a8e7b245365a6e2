"""The trackers of a run, each in a thread of its own, so that a slow or failing one neither slows nor stops the run."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from vlmrl.report.trackers.base import Number, Status, TableRow, Tracker
from vlmrl.types import Trajectory
from vlmrl.utils.output_files import atomic_write

TABLE_ROWS = 8  # trajectories in a table
QUEUED = 256  # calls that wait for a slow tracker at most; later ones are dropped
CLOSE_SECONDS = 60.0  # for all trackers to send what waits, at the end
STOPPED_SECONDS = 5.0  # of a run that was stopped: a scheduler may be about to kill it

Say = Callable[[str], None]
Call = Callable[[Tracker], None]


class Trackers:
    """All trackers of a run: ``Trackers({"wandb": tracker}, Path("runs/geo3k"), table_every=10)``.

    Each row of metrics goes to all of them, and the first 8 trajectories of each evaluation and of every ``table_every``-th step. What
    a tracker has got is kept in the run's folder: after a resume it gets no step again. ``say`` prints a line.
    """

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path, table_every: int = 10, say: Say = print) -> None:
        self._folder = folder
        self._table_every = table_every
        self.earlier_steps = 0
        """Of the run's stages that have ended: the steps that trackers get rise over all stages."""
        self._threads = [TrackerThread(name, tracker, folder, say) for name, tracker in trackers.items()]

    @classmethod
    def none(cls) -> Self:
        return cls({}, Path())

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """One row of metrics. Returns at once."""
        kind = next(iter(values), "").partition("/")[0]
        series = f"rows of {kind if kind in ('eval', 'blanked') else 'train'}"
        shown = self.earlier_steps + step
        for thread in self._threads:
            thread.put(series, shown, lambda tracker: tracker.log(shown, values))

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
            thread.put(f"table of {kind}", place, send)

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

    def __init__(self, name: str, tracker: Tracker, folder: Path, say: Say) -> None:
        self._name = name
        self._tracker = tracker
        self._say = say
        self._had_errors = False
        self._sent = SentSteps(folder / "trackers" / f"{name}.steps")
        self._queue: queue.Queue[tuple[str, int, Call] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=f"vlmrl-tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, series: str, step: int, call: Call) -> None:
        """Call the tracker later, unless an earlier start of the run has sent this step of the ``series``."""
        if self._sent.before(series, step):
            return
        if self._queue.qsize() >= QUEUED:
            self._complain(f"is slower than the run: {QUEUED} calls wait, and what comes now is left out")
            return
        self._queue.put((series, step, call))

    def finish(self, status: Status, curve: Path) -> None:
        """Close the tracker after what waits."""

        def close(tracker: Tracker) -> None:
            try:
                if curve.exists():
                    tracker.log_image("reward", curve)
            finally:
                tracker.close(status)

        self._queue.put(("", 0, close))
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._say(f"tracker {self._name} is still sending; the run ends without it. {self._tracker.remedy}")

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            series, step, call = item
            try:
                call(self._tracker)
                if series:
                    self._sent.add(series, step)
            except Exception as error:
                self._complain(f"failed: {type(error).__name__}: {error}")

    def _complain(self, what: str) -> None:
        if not self._had_errors:
            self._had_errors = True
            self._say(f"tracker {self._name} {what:.500}; the run goes on. {self._tracker.remedy}")


class SentSteps:
    """The last step of each series that a tracker has got, in a file: ``{"rows of train": 57, "rows of eval": 50}``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        self._at_start = dict(self._steps)

    def before(self, series: str, step: int) -> bool:
        """Whether an earlier start of the run has sent this step."""
        return step <= self._at_start.get(series, -1)

    def add(self, series: str, step: int) -> None:
        self._steps[series] = step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path, json.dumps(self._steps))
