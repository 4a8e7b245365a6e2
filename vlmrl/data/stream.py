"""The order in which a run draws its tasks, its position in it, and the length of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from vlmrl.data.mixture import Tasks
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import Task


class TaskStream(Iterator[Task]):
    """Endless tasks: epoch after epoch, each in its own order.

    Of a source of 3 tasks, draws 0 to 2 are the first epoch, draws 3 to 5 the second, and so on. A draw's number determines its task
    in every process, so that a resumed run can draw it again.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.drawn = 0  # the number of draws, which is the whole position
        self.too_long = 0  # draws that were skipped because the prompt exceeds data.max_prompt_tokens

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
        """The task of draw ``number``, from 0; the stream's position stays."""
        return self.tasks.draw(number)

    def state(self) -> dict[str, int]:
        """For a checkpoint: ``{"drawn": 17, "too_long": 0}``."""
        return {"drawn": self.drawn, "too_long": self.too_long}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state`."""
        self.drawn, self.too_long = state["drawn"], state["too_long"]

    def metrics(self) -> dict[str, float]:
        """The tasks drawn and skipped since the run began, and the number of epochs drawn."""
        return {
            "data/drawn": float(self.drawn),
            "data/too_long": float(self.too_long),
            "data/epochs": self.drawn / len(self.tasks),
        }


def prompt_tokens(
    renderer: Renderer, store: MediaStore | None, tools: Callable[[Task], Sequence[dict[str, Any]]]
) -> Callable[[Task], int]:
    """A function that counts the tokens of a task's prompt, images expanded but not decoded or processed.

    ``tools`` returns the tools of a task's env. A prompt that ``Env.reset`` returns instead of the task's own is not known here.
    """

    def count(task: Task) -> int:
        rendered = renderer.prompt(task.prompt, tools(task))
        if not rendered.images:
            return len(rendered.token_ids)
        assert store is not None  # the renderer of a text model refuses images
        return len(rendered.token_ids) + sum(store.measure(image).num_tokens - 1 for image in rendered.images)

    return count
