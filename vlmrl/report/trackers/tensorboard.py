"""TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.report.trackers.base import Number, TableRow, Tracker, numbers_of
from vlmrl.utils.require import import_extra


class TensorBoardTracker(Tracker):
    """Event files in the run's folder, for ``tensorboard --logdir runs``: scalars, the config and trajectories as text, images."""

    package = "tensorboard"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._writer = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        for name, value in numbers_of(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_trajectories(self, step: int, kind: str, rows: Sequence[TableRow]) -> None:
        for index, row in enumerate(rows):
            name = f"trajectories/{kind}/{index}"
            facts = f"{row.id}: reward {row.reward}, ending {row.ending}"
            self._writer.add_text(name, "\n\n".join([facts, _quoted(row.prompt), _quoted(row.response)]), step)
            if (sheet := row.sheet()) is not None:
                self._writer.add_image(name, np.asarray(sheet), step, dataformats="HWC")

    def log_image(self, name: str, path: Path) -> None:
        with Image.open(path) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), dataformats="HWC")

    def close(self, status: str) -> None:
        self._writer.close()


def _quoted(text: str) -> str:
    """``text`` as a Markdown block, in which nothing is markup."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
