"""The order in which a run draws its tasks, and its place in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from vlmrl.data.mixture import Tasks
from vlmrl.types import Task


class TaskStream(Iterator[Task]):
    """Tasks without end: epoch after epoch, each in its own order. Its place is one number, ``drawn``.

    Of a source of 3 tasks the draws are ``at(0), at(1), ...``: the first epoch's three, the second's three, and so on. ``at`` is
    the same in every process, so a task that was drawn can be had again by its number. Prompts that are too long are drawn, passed
    over and counted in ``too_long``.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.drawn = 0
        self.too_long = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task:
        for _ in range(len(self.tasks)):
            task = self.at(self.drawn)
            self.drawn += 1
            if self.tasks.fits(task):
                return task
            self.too_long += 1
        raise ValueError(f"data.max_prompt_tokens leaves nothing: {len(self.tasks)} prompts in a row were longer.")

    def at(self, number: int) -> Task:
        """The task of draw ``number``, from 0, wherever the stream is."""
        return self.tasks.draw(number)

    def state(self) -> dict[str, int]:
        """For a checkpoint: ``{"drawn": 17, "too_long": 0}``."""
        return {"drawn": self.drawn, "too_long": self.too_long}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state` was asked."""
        self.drawn, self.too_long = state["drawn"], state["too_long"]

    def metrics(self) -> dict[str, float]:
        """How many tasks were drawn and passed over since the run began, and how many epochs that is."""
        return {
            "data/drawn": float(self.drawn),
            "data/too_long": float(self.too_long),
            "data/epochs": self.drawn / len(self.tasks),
        }
