"""Reads a run's folder, also while the run goes on and after it was killed.

    run = vlmrl.load_run("runs/geo3k")
    run.metrics[-1]["reward/mean"]
    for group_id, members in run.groups(step=3).items():
        for record in members:
            print(record["reward"], record["turns"][0]["text"])
    run.image(record["turns"][0]["images"][0]).show()

It needs neither the recipe nor its model. Records are those of :mod:`vlmrl.report.records`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vlmrl.report.json_lines import JsonLinesTail, Line
from vlmrl.types import FAILED
from vlmrl.utils.json_files import object_of
from vlmrl.utils.output_files import open_regular, regular_file

Record = dict[str, Any]
FILES = ("metrics", "trajectories", "advisories")  # NAME.jsonl in a run's folder
LISTS = (*FILES, "failures")
FAILURE = ("step", "kind", "id", "group_id", "task_id", "source", "error", "reason", "retried")
IMAGE_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")  # a file's name has 255 characters at most
MOST_BYTES = 64 * 2**20  # of config.json, of summary.json, of an image and of an agent's log: ours are far smaller


def load_run(path: Path | str) -> RunData:
    """The run in the folder ``path``, such as ``runs/geo3k``.

    Raises:
        ValueError: the folder does not exist, holds no run, or has files that no run writes: links, pipes, broken records.
    """
    run = RunData(Path(path))
    run.refresh()
    return run


class RunData:
    """What a run had written at the last :meth:`refresh`: its config, metrics, trajectories, images, failures and advisories.

    The folder may come from somebody else: only regular files in it are read, no link is followed, and their sizes are bounded.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(
                f"run folder {folder}: there is no such folder; give the folder of a run, such as runs/NAME."
            )
        if not any((folder / name).exists() for name in ("config.json", *(f"{each}.jsonl" for each in FILES))):
            runs = sorted(path.parent.name for path in folder.glob("*/config.json"))
            inside = f" Name runs in it, such as {folder / runs[0]}." if runs else ""
            raise ValueError(
                f"run folder {folder}: it has no config.json and no metrics.jsonl, so it holds no run.{inside}"
            )
        self._folder = folder
        self.config: Record = {}
        """The resolved config: ``run.config["optim"]["lr"]``."""
        self.metrics: list[Record] = []
        """The rows of ``metrics.jsonl``, of training steps and evaluations, in the order in which they were logged."""
        self.failures: list[Record] = []
        """The failed trajectories: their fields :data:`FAILURE`, and ``turns``, the number of turns that were played."""
        self.advisories: list[Record] = []
        """The advisories, as :class:`vlmrl.report.advisories.Advisory` has them."""
        self._places: list[_Place] = []  # of the trajectories: those of a long run do not fit into memory
        self._start_over()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder

    @property
    def name(self) -> str:
        """The name of its folder: that of a run which was set aside differs from the name in its config."""
        return self.folder.resolve().name

    @property
    def summary(self) -> Record:
        """``summary.json``, written at the end; empty before."""
        return self._object("summary.json") or {}

    @property
    def steps(self) -> list[int]:
        """The steps that have trajectories, in order."""
        return sorted({place.step for place in self._places})

    def refresh(self, each: Callable[[Record, int], object] | None = None) -> bool:
        """Read what the run has written since the last call. Returns whether there was anything new.

        After a resume, which takes back what was logged since the checkpoint, the files are read again, and ``generation`` is another.
        ``each`` is called with the record of each new trajectory, which is not kept, and the number of its line.

        Raises:
            ValueError: a file is a link or no regular file, or has a line that no run writes.
        """
        self.config = self._object("config.json") or self.config
        for name in FILES:
            self._check_regular(f"{name}.jsonl")
            self._tails[name].path = self.folder / f"{name}.jsonl"  # the folder may have been renamed
        is_new = any(tail.is_rewritten() for tail in self._tails.values())
        if is_new:
            self._start_over()
        for name, rows in (("metrics", self.metrics), ("advisories", self.advisories)):
            lines = [line.value for line in self._tails[name].lines()]
            is_new |= bool(lines)
            rows += lines
        for line in self._tails["trajectories"].lines():
            is_new = True
            try:
                self._add(line)
                if each is not None:
                    each(line.value, len(self._places) - 1)
            except (AttributeError, KeyError, TypeError) as error:
                path = self.folder / "trajectories.jsonl"
                raise ValueError(
                    f"{path}: the line at byte {line.start} is not a record of a trajectory: {error!r}."
                ) from error
        return is_new

    def record(self, number: int) -> Record:
        """The record of the trajectory in line ``number``, from 0. Raises IndexError if there is no such line."""
        return self._reread(self._places[number])

    def trajectories(self, step: int | None = None, kind: str | None = None) -> list[Record]:
        """The records of trajectories of one ``step`` or of all, of one ``kind`` (``train``, ``eval``, ``blanked``) or of all."""
        places = [place for place in self._places if step in (None, place.step) and kind in (None, place.kind)]
        return [self._reread(place) for place in places]

    def groups(self, step: int, kind: str = "train") -> dict[str, list[Record]]:
        """The records of one step by ``group_id``."""
        groups: dict[str, list[Record]] = {}
        for record in self.trajectories(step, kind):
            groups.setdefault(record["group_id"], []).append(record)
        return groups

    def image_path(self, image_id: str) -> Path | None:
        """The PNG file of an image; ``None`` if it was not kept: of each step, those of the first trajectories are."""
        return self._own_file("images", f"{image_id}.png") if IMAGE_ID.fullmatch(image_id) else None

    def image(self, image_id: str) -> Image.Image:
        """An image as the model saw it, at the model's size.

        Raises:
            KeyError: the run did not keep it.
        """
        path = self.image_path(image_id)
        if path is None:
            raise KeyError(
                f"{self.folder}: image {image_id} was not kept: of each step, those of the first trajectories are."
            )
        with (
            open_regular(path, self.folder) as file,
            Image.open(file, formats=["PNG"]) as image,  # other formats start programs
        ):
            image.load()
        return image

    def log_path(self, trajectory_id: str) -> Path | None:
        """The output of the command that played a trajectory; ``None`` if it was deleted: the latest ones are kept."""
        return self._own_file("agents", f"{trajectory_id}.log")

    def _own_file(self, folder: str, name: str) -> Path | None:
        """A regular file of bounded size in a folder of the run. No link is followed."""
        path = regular_file(self.folder, folder, name)
        return path if path is not None and path.stat().st_size <= MOST_BYTES else None

    def _object(self, name: str) -> Record | None:
        """The object in a JSON file of the run; ``None`` if there is no such file, or something else in it."""
        self._check_regular(name)
        path = self.folder / name
        try:
            file = open_regular(path)
        except OSError:  # there is none, or it may not be read
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise ValueError(f"{path}: it must be at most {MOST_BYTES} bytes, but it has {size}.")
            return object_of(file.read(size))

    def _check_regular(self, name: str) -> None:
        path = self.folder / name
        if os.path.lexists(path) and regular_file(self.folder, name) is None:
            raise ValueError(
                f"{path}: it must be a regular file, but it is a link or something else, and the run may not be yours: links are "
                "not followed. Copy the file there."
            )

    def _add(self, line: Line) -> None:
        record = line.value
        images = [key for turn in record["turns"] for key in turn["images"]]
        texts = [record["id"], record["group_id"], record["ending"], *images]
        if type(record["step"]) is not int or not all(isinstance(text, str) for text in texts):
            raise TypeError("its step must be a whole number; its ids, its ending and its images must be texts")
        for number, turn in enumerate(record["turns"]):
            parent = turn.get("parent")  # the view follows parents up to the first turn
            if parent is not None and not (type(parent) is int and 0 <= parent < number):
                raise TypeError(f"the parent of its turn {number} must be the number of a turn before it, or null")
        # older versions of vlmrl logged training alone, without a kind
        self._places.append(_Place(record["step"], record.get("kind", "train"), line.start, line.size))
        if record["ending"] in FAILED:
            self.failures.append({key: record.get(key) for key in FAILURE} | {"turns": len(record["turns"])})

    def _reread(self, place: _Place) -> Record:
        self._check_regular("trajectories.jsonl")
        tail = self._tails["trajectories"]
        tail.path = self.folder / "trajectories.jsonl"
        return {"kind": place.kind, **tail.reread(place.start, place.size)}

    def _start_over(self) -> None:
        for rows in (self.metrics, self.failures, self.advisories, self._places):
            rows.clear()
        self.generation = uuid.uuid4().hex
        """Changes when lines that were read are no longer in the files."""
        self._tails = {name: JsonLinesTail(self.folder / f"{name}.jsonl") for name in FILES}


class _Place(NamedTuple):
    """Where a trajectory's line is in its file."""

    step: int
    kind: str
    start: int
    size: int
