"""The files of a run's folder: metrics, trajectories and advisories as JSON lines, and the config.

    runs/geo3k/config.json           the resolved config
    runs/geo3k/metrics.jsonl         {"step": 3, "time": 1767225600.125, "reward/mean": 0.25, ...}
    runs/geo3k/trajectories.jsonl    {"step": 3, "kind": "train", "id": "step000003/00000/00", "reward": 1.0, "turns": [...], ...}
    runs/geo3k/advisories.jsonl      {"name": "truncated", "step": 1, "message": "...", "setting": "rollout.max_response_tokens"}

:class:`vlmrl.report.trajectory_log.TrajectoryLog` writes the trajectories and their images, :func:`vlmrl.load_run` reads all of it.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

from vlmrl.report.json_lines import JsonLinesTail
from vlmrl.report.records import plain
from vlmrl.report.trackers import Number, Status, Trackers
from vlmrl.utils.output_files import atomic_write, output_errors

OnRow = Callable[[Mapping[str, Any]], object]


class RunLog:
    """The folder of one run and the files in it: ``RunLog(Path("runs/geo3k")).log(3, {"reward/mean": 0.25})``.

    To resume, ``sizes`` is the result of :meth:`sizes` at the checkpoint: the files are truncated to it, since the resumed run writes
    the later lines again. ``{}`` empties the files. Without ``sizes``, a folder that holds a run is an error. Each row of metrics
    also goes to the ``trackers``, which are closed with the log.
    """

    FILES = ("metrics.jsonl", "trajectories.jsonl", "advisories.jsonl")

    def __init__(
        self, folder: Path | str, sizes: Mapping[str, int] | None = None, trackers: Trackers | None = None
    ) -> None:
        self.folder = Path(folder)
        self.trackers = trackers or Trackers({}, self.folder)
        if sizes is None and any(_size(self.folder / name) for name in self.FILES):
            raise ValueError(
                f"run folder {self.folder}: it holds a run already; resume that run or choose another name."
            )
        sizes = sizes or {}
        check_sizes(self.folder, sizes)  # of all files, before the first is changed
        with output_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in self.FILES:
                if _size(self.folder / name) > sizes.get(name, 0):
                    os.truncate(self.folder / name, sizes.get(name, 0))
            self._folder_stat = self.folder.stat()
        self.on_row: OnRow | None = None
        """Called with each row of metrics after it is written."""
        self._open: dict[str, FileIO] = {}
        self._unflushed: set[str] = set()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row to ``metrics.jsonl``. Raises ValueError for a value that is not a finite number, a string or ``None``."""
        row: dict[str, Number] = {"step": step, "time": round(time.time(), 3)}
        for key, value in values.items():
            if key in row:
                raise ValueError(f"metric {key!r}: every row has a {key!r} of its own; rename the metric.")
            row[key] = check_metric(key, value)
        self.append("metrics.jsonl", [row])
        self.trackers.log(step, {key: row[key] for key in values})
        if self.on_row is not None:
            self.on_row(row)

    def append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record to ``name``, one of :data:`FILES`."""
        self.append_lines(name, json_lines(records))

    def write_config(self, config: Any) -> None:
        """Write the resolved config (a dataclass or a dict) to ``config.json``."""
        atomic_write(self.folder / "config.json", json.dumps(plain(config), indent=2) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of ``metrics.jsonl``, including those before a resume."""
        return read_rows(self.folder / "metrics.jsonl")

    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes, for a checkpoint: ``{"metrics.jsonl": 5120, "trajectories.jsonl": 0}``.

        What it measures is on the disk: a checkpoint that survives a power failure finds these lines.
        """
        while self._unflushed:
            name = self._unflushed.pop()
            with output_errors(self.folder / name):
                os.fsync(self._open[name].fileno())
        return {name: _size(self.folder / name) for name in self.FILES}

    def close(self, status: Status = "finished") -> None:
        """Close the files and the trackers, which get the ``status`` of the run."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        self._unflushed.clear()
        self.trackers.close(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "failed")

    def append_lines(self, name: str, lines: bytes) -> None:
        """Append the :func:`json_lines` of records, which a thread may have made."""
        if not lines:
            return
        with output_errors(self.folder / name):
            file = self._file(name)
            self._unflushed.add(name)
            size = os.fstat(file.fileno()).st_size
            # an editor may leave out the last newline
            is_cut = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
            try:
                _write_all(file, b"\n" * is_cut + lines)
            except OSError:
                os.ftruncate(file.fileno(), size)  # no half line
                raise

    def _file(self, name: str) -> FileIO:
        """The file that has this name now: an editor puts another one in its place.

        After the folder was renamed it is the open file. Once that is deleted, it is the copy of it in the folder's place: to move a
        folder to another disk is to copy and delete it.
        """
        path, earlier = self.folder / name, self._open.get(name)
        if earlier is not None:
            is_moved = not _is(self.folder, self._folder_stat)
            if _is(path, earlier.fileno()) or (is_moved and (_has_name(earlier) or _is_of_another_run(path, earlier))):
                return earlier
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
        if earlier is not None:
            earlier.close()
        self._open[name] = file
        return file


def json_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """One line of JSON per record. Raises ValueError for a number that is not finite."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if a file of the log is shorter than it was at the checkpoint of these ``sizes``, or has other lines."""
    for name, size in sizes.items():
        path, restore = folder / name, "restore the file, or resume in the folder that the checkpoint belongs to."
        if (present := _size(path)) < size:
            raise ValueError(f"{path} has {present} bytes, but had {size} when the checkpoint was made; {restore}")
        if size and not _ends_line(path, size):  # cut there, half a line would stay, which no command can read
            raise ValueError(f"{path} was changed: byte {size}, where the checkpoint was made, ends no line; {restore}")


def _ends_line(path: Path, size: int) -> bool:
    """Whether the first ``size`` bytes end a line."""
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is(path: Path, found: os.stat_result | int) -> bool:
    """Whether ``path`` is the file or folder that ``found`` describes or, a handle, has open."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(found) if isinstance(found, int) else found)
    return False


def _has_name(file: FileIO) -> bool:
    """Whether an open file was not deleted."""
    with suppress(OSError):  # as NFS raises for one that another machine has deleted
        return os.fstat(file.fileno()).st_nlink > 0
    return False


def _is_of_another_run(path: Path, file: FileIO) -> bool:
    """Whether the file at ``path`` begins otherwise than the open one: a later run may have the folder's name."""
    if not path.exists():
        return False
    with path.open("rb") as other:
        found, own = other.read(4096), os.pread(file.fileno(), 4096, 0)
    return not (found.startswith(own) or own.startswith(found))


def _write_all(file: FileIO, data: bytes) -> None:
    """An unbuffered file may write less than it is given, which it does on a disk that becomes full."""
    while data:
        data = data[file.write(data) :]


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, without a last line that a killed process left incomplete."""
    return [line.value for line in JsonLinesTail(Path(path)).lines()]


def check_metric(key: str, value: Any) -> Number:
    """``value`` as a plain number, a string or ``None``. Raises ValueError, naming ``key``, for anything else."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"metric {key!r} must be one finite number, a string or None, but it is {value!r:.80}; "
        "log each part of a dict or list under its own name, and an unknown value as None."
    )
