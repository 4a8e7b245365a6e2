"""Experiment trackers: where a run's metrics and trajectories go besides the files in its folder.

    report=Report(to=("tensorboard", "wandb", "my_tracker.py:MyTracker"))

    class MyTracker(Tracker):
        def log(self, step, values):
            requests.post(URL, json={"step": step, **values})

Adding one is a subclass of :class:`Tracker`, in your own file or in a file here with a line in ``TRACKERS``.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrl.config.code import load_object
from vlmrl.report.trackers.base import Number, Status, TableRow, Tracker, kept_id, numbers_of
from vlmrl.report.trackers.tensorboard import TensorBoardTracker
from vlmrl.report.trackers.tracker_threads import Say, Trackers
from vlmrl.report.trackers.wandb import WandbTracker
from vlmrl.utils.output_files import output_errors

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
"""Trackers by name; each is also the extra of vlmrl that installs its package."""

__all__ = [
    "TRACKERS",
    "Number",
    "Status",
    "TableRow",
    "Tracker",
    "Trackers",
    "kept_id",
    "numbers_of",
    "open_trackers",
    "tracker_classes",
]


def tracker_classes(names: Sequence[str]) -> dict[str, type[Tracker]]:
    """The classes of these names.

    Raises:
        ValueError: a name is neither registered nor ``file.py:Class`` of a :class:`Tracker`, or its package is not installed.
    """
    for name in names:
        if name not in TRACKERS and ":" not in name:
            raise ValueError(f"report.to must be of {', '.join(TRACKERS)} or file.py:Class, but one is {name!r}.")
    shown = [name.rpartition(":")[2] for name in names]
    if twice := {name for name in shown if shown.count(name) > 1}:
        raise ValueError(
            f"report.to must have each name once, but it has {min(twice)!r} several times: rename a class."
        )
    return {name.rpartition(":")[2]: _tracker_class(name) for name in names}


def _tracker_class(name: str) -> type[Tracker]:
    found = TRACKERS[name] if name in TRACKERS else load_object(name)
    if not (inspect.isclass(found) and issubclass(found, Tracker)):
        raise ValueError(f"report.to {name} must be a subclass of vlmrl.report.trackers.Tracker, but it is {found!r}.")
    if found.package is not None and importlib.util.find_spec(found.package) is None:
        raise ValueError(
            f"report.to {name} needs {found.package}, which is not installed: pip install 'vlmrl[{name}]'."
        )
    return found


def open_trackers(names: Sequence[str], folder: Path, config: dict[str, Any], say: Say = print) -> Trackers:
    """The trackers of these names, open. The run's ``folder`` is made for them; ``config`` is its config as a dict (`records.plain`).

    Raises:
        ValueError: as :func:`tracker_classes`, or a tracker does not start, such as one that finds no account.
    """
    opened: dict[str, Tracker] = {}
    kinds = tracker_classes(names)
    if kinds:
        with output_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    for name, kind in kinds.items():
        try:
            opened[name] = kind(folder, config)
        except Exception as error:
            for tracker in opened.values():
                tracker.close("failed")
            remedy = "" if kind.remedy == Tracker.remedy else f" {kind.remedy}"
            raise ValueError(
                f"report.to {name} did not start: {str(error) or type(error).__name__}.{remedy}"
            ) from error
    return Trackers(opened, folder, say=say)
