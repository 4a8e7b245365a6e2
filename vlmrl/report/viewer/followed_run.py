"""Follows a run's folder for a page: returns the lines appended since the page's last request."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmrl.report.run_data import LISTS, RunData

QUESTION_LENGTH = 160  # characters


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

    def updates(
        self, generation: str = "", counts: Mapping[str, int] | None = None, most: int | None = None
    ) -> dict[str, Any]:
        """The entries of each list after the first ``counts[name]``, at most ``most`` of each.

        ``generation`` changes when a resumed run has cut its files: then, and at first, the response has everything from the
        start, with ``config`` and ``folder`` besides. ``more`` is whether further entries are waiting.
        """
        with self._lock:
            self._refresh()
            again = generation != self._run.generation
            starts = {name: 0 if again else max(0, (counts or {}).get(name, 0)) for name in LISTS}
            lists = {name: self._list(name)[start:][:most] for name, start in starts.items()}
            more = any(starts[name] + len(rows) < len(self._list(name)) for name, rows in lists.items())
            response = {"generation": self._run.generation, "name": self.name, **lists, "more": more}
        response["summary"] = self._run.summary
        return response | ({"config": self._run.config, "folder": str(self.folder)} if again else {})

    def record(self, number: int) -> dict[str, Any]:
        """The record of the trajectory in line ``number``. Raises IndexError if there is no such line."""
        with self._lock:
            return self._run.record(number)

    def search(self, text: str, step: int | None = None, ends: Callable[[], bool] = lambda: False) -> list[int]:
        """The numbers of the trajectories of a step (of all steps: ``None``) whose text contains ``text`` in any case.

        Once ``ends`` is true, no more are read.
        """
        words = text.lower()
        with self._lock:
            self._refresh()
            numbers = [row["n"] for row in self._overviews if step in (None, row["step"])]
        left = itertools.takewhile(lambda _: not ends(), numbers)
        return [number for number in left if words in search_text(self.record(number))]

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


def overview(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A few fields of a trajectory's record: ``{"n": 7, "id": "train/3#1", "step": 3, "reward": 1.0, "question": "Which?", ...}``.

    ``n`` is the number of its line in ``trajectories.jsonl``; ``image`` the id of its first image, or ``None``.
    """
    turns = record.get("turns") or []
    kept = ("id", "group_id", "task_id", "source", "reward", "ending")
    return {
        "n": number,
        "step": record.get("step"),
        "kind": record.get("kind") or "train",
        **{name: record.get(name) for name in kept},
        "turns": len(turns),
        "tokens": sum(turn.get("sampled_tokens") or 0 for turn in turns),
        "image": next((image for turn in turns for image in turn.get("images") or []), None),
        "question": _question(record)[:QUESTION_LENGTH],
    }


def _question(record: Mapping[str, Any]) -> str:
    """The user's text before the first response, or else the prompt."""
    turns = record.get("turns") or []
    messages = (turns[0].get("messages") or []) if turns else []
    parts = [part for message in messages if message["role"] == "user" for part in message["parts"]]
    text = " ".join(part.get("text") or "" for part in parts).strip()
    return text or str(record.get("prompt") or "").replace("[image]", "").strip()


def search_text(record: Mapping[str, Any]) -> str:
    """All text of a trajectory in lower case, for a search: its id, prompt, answer, error, responses and observations."""
    turns = record.get("turns") or []
    texts = [record.get(name) for name in ("id", "task_id", "prompt", "answer", "error")]
    texts += [turn.get(name) for turn in turns for name in ("text", "observation")]
    return "\n".join(str(text) for text in texts if text is not None).lower()
