"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.report.trackers.base import Number, Status, TableRow, Tracker, kept_id
from vlmrl.utils.require import import_extra

COLUMNS = ["step", "kind", "id", "prompt", "response", "reward", "ending"]
EXIT_CODES: dict[Status, int] = {"finished": 0, "stopped": 130, "failed": 1}


class WandbTracker(Tracker):
    """A run of Weights & Biases. Its usual variables apply: ``WANDB_API_KEY``, ``WANDB_MODE=offline``, ``WANDB_ENTITY``, and
    ``WANDB_PROJECT``, without which the project is `vlmrl`."""

    package = "wandb"
    remedy = (
        "Set WANDB_MODE=offline where the network fails, and upload later with `wandb sync RUN/wandb/offline-run-*`."
    )

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._wandb = import_extra("wandb", "wandb")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vlmrl"),
            name=config["name"],
            id=kept_id(folder, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(folder),
            config=config,
            settings=self._wandb.Settings(console="off"),  # the console is the run's: W&B would wrap it
        )

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        self._run.log({name: value for name, value in values.items() if value is not None}, step=step)

    def log_trajectories(self, step: int, kind: str, rows: Sequence[TableRow]) -> None:
        table = self._wandb.Table(columns=[*COLUMNS, "images"])
        for row in rows:
            sheet, text = row.sheet(), row.text()
            table.add_data(*(text[name] for name in COLUMNS), None if sheet is None else self._wandb.Image(sheet))
        self._run.log({f"trajectories/{kind}": table}, step=step)

    def log_image(self, name: str, path: Path) -> None:
        self._run.log({name: self._wandb.Image(str(path))})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=EXIT_CODES[status])
