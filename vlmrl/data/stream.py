"""The order in which a run draws its tasks, and its place in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from vlmrl.data.source import TaskSource
from vlmrl.types import Task


class TaskStream(Iterator[Task]):
    """Tasks without end: epoch after epoch, each in its own order. Its place is one number, ``drawn``.

    Of a source of 3 tasks the draws are ``at(0), at(1), ...``: the first epoch's three, the second's three, and so on. ``at`` is
    the same in every process, so a task that was drawn can be had again by its number.
    """

    def __init__(self, source: TaskSource) -> None:
        self.source = source
        self.drawn = 0
        self._epoch = -1
        self._order: list[int] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task:
        task = self.at(self.drawn)
        self.drawn += 1
        return task

    def at(self, number: int) -> Task:
        """The task of draw ``number``, from 0, wherever the stream is."""
        epoch, place = divmod(number, len(self.source))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.source.order(epoch)
        return self.source[self._order[place]]

    def state(self) -> dict[str, int]:
        """For a checkpoint: ``{"drawn": 17}``."""
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state` was asked."""
        self.drawn = state["drawn"]
