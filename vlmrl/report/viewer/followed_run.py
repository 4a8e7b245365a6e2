"""A run's folder as a page follows it: what was appended since the page last requested it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.report.run_data import LISTS, RunData
from vlmrl.report.viewer.overview import overview, search_text

MOST_AT_ONCE = 4000  # entries of each list in one response


class FollowedRun:
    """One run, read as it grows: ``FollowedRun(Path("runs/geo3k")).updates()``.

    Of trajectories it holds an :func:`overview` of each; :meth:`record` reads one again from the file. Every method may be called from
    any thread. Raises ValueError if ``folder`` holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = RunData(folder)
        self._overviews: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._run.name

    def updates(self, generation: str = "", counts: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The entries of each list after the first ``counts[name]``, at most 4000 of each.

        ``generation`` changes when a resumed run has cut its files: then, and at first, the response has everything from the
        start, with ``config`` and ``folder`` besides. ``more`` is whether further entries are waiting.
        """
        with self._lock:
            self._refresh()
            again = generation != self._run.generation
            starts = {name: 0 if again else max(0, (counts or {}).get(name, 0)) for name in LISTS}
            lists = {name: self._list(name)[start : start + MOST_AT_ONCE] for name, start in starts.items()}
            more = any(starts[name] + len(rows) < len(self._list(name)) for name, rows in lists.items())
            response = {"generation": self._run.generation, "name": self.name, **lists, "more": more}
        response["summary"] = self._run.summary
        return response | ({"config": self._run.config, "folder": str(self.folder)} if again else {})

    def record(self, number: int) -> dict[str, Any]:
        """The record of the trajectory in line ``number``. Raises IndexError if there is no such line."""
        with self._lock:
            return self._run.record(number)

    def search(self, text: str, step: int | None = None) -> list[int]:
        """The numbers of the trajectories of a step (of all steps: ``None``) whose text contains ``text`` in any case."""
        words = text.lower()
        with self._lock:
            self._refresh()
            numbers = [row["n"] for row in self._overviews if step in (None, row["step"])]
        return [number for number in numbers if words in search_text(self.record(number))]

    def image_path(self, image_id: str) -> Path | None:
        """The file of an image, or None if there is none. Other paths than those of images are never returned."""
        return self._run.image_path(image_id)

    def log_path(self, number: int) -> Path | None:
        """The output of the command that played the trajectory in line ``number``, or None if there is none."""
        return self._run.log_path(str(self.record(number)["id"]))

    def _list(self, name: str) -> list[dict[str, Any]]:
        return self._overviews if name == "trajectories" else getattr(self._run, name)

    def _refresh(self) -> None:
        generation, new = self._run.generation, list[dict[str, Any]]()
        self._run.refresh(lambda record, number: new.append(overview(record, number)))
        if self._run.generation != generation:
            self._overviews.clear()
        self._overviews += new
