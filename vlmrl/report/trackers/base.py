"""The interface of trackers, and the rows of their trajectory table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from PIL import Image

from vlmrl.report.records import messages_text
from vlmrl.types import Trajectory
from vlmrl.utils.output_files import atomic_write

Number = float | int | str | None
"""A metric's value. Floats are finite; ``None`` means not known."""
Status = Literal["finished", "stopped", "failed"]
"""How a run ended: by itself, by Ctrl-C or a signal, or by an error."""

MAX_IMAGES = 8  # of one trajectory, in a table
MAX_SIDE = 384  # pixels of an image in a table


@dataclass(frozen=True)
class TableRow:
    """One trajectory in a table: ``TableRow(10, "eval", "eval000010/00003/00", "Which letter?", "B", 1.0, "env_done", [image])``."""

    step: int
    kind: str
    """``train``, ``eval`` or ``blanked``."""
    id: str
    prompt: str
    response: str
    """The responses of all turns."""
    reward: float | None
    ending: str | None
    images: list[Image.Image]
    """What the model saw first, at most 8 images, reduced to 384 pixels a side."""

    @classmethod
    def of(cls, step: int, kind: str, trajectory: Trajectory) -> TableRow:
        """It decodes images: do not call it on an event loop."""
        turns = trajectory.turns
        media = [item for turn in turns for item in turn.media][:MAX_IMAGES]
        images = []
        for item in media:
            images.append(item.image)
            images[-1].thumbnail((MAX_SIDE, MAX_SIDE))
        prompt = messages_text(turns[0].messages if turns and turns[0].messages else trajectory.task.prompt)
        response = "\n\n".join(turn.text for turn in turns)
        return cls(step, kind, trajectory.id, prompt, response, trajectory.reward, trajectory.ending, images)

    def text(self) -> dict[str, Any]:
        """All columns but the images."""
        return {name: value for name, value in vars(self).items() if name != "images"}

    def sheet(self) -> Image.Image | None:
        """The images side by side; ``None`` if there are none."""
        if not self.images:
            return None
        sheet = Image.new("RGB", (sum(each.width for each in self.images), max(each.height for each in self.images)))
        left = 0
        for each in self.images:
            sheet.paste(each, (left, 0))
            left += each.width
        return sheet


class Tracker:
    """Receives a run's reports. Subclasses override the methods that they need.

    All methods are called in one thread that is the tracker's own, in the order of the run. What they raise is said once, and the run
    goes on. Only what the constructor raises, before the run starts, is the user's to correct.
    """

    package: ClassVar[str | None] = None
    """A package that must be installed."""
    remedy: ClassVar[str] = "The run's metrics.jsonl has every row."
    """What to do if a method fails."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """``folder``: the run's. ``config``: the run's settings in JSON types."""

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Record one row of ``metrics.jsonl``."""

    def log_trajectories(self, step: int, kind: str, rows: Sequence[TableRow]) -> None:
        """Record some trajectories of a step (``kind`` train) or of an evaluation (eval, blanked)."""

    def log_image(self, name: str, path: Path) -> None:
        """Record a PNG file: the reward curve, at the end."""

    def close(self, status: Status) -> None:
        """The run has ended. Called once, last."""


def kept_id(folder: Path, name: str, new: Callable[[], str]) -> str:
    """The id of the run in ``folder`` at the tracker ``name``: the one of its first start, so that a resumed run continues it.

    ``new`` makes it at the first start.
    """
    path = folder / "trackers" / f"{name}.id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = new()
    atomic_write(path, made + "\n")
    return made


def numbers_of(values: Mapping[str, Number]) -> dict[str, float]:
    """The values that are numbers."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
