"""The order in which a run draws its tasks, its position in it, rows that cannot be played, and the length of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vlmrl.data.mixture import Tasks
from vlmrl.multimodal.fetch import is_url
from vlmrl.multimodal.renderer import Renderer, TooLongError
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import ImageSource, MediaItem, Task
from vlmrl.utils.work_pool import DeadlineError, WorkPool


class Draw(NamedTuple):
    """A drawn task, or a bad row: then ``error`` says why it cannot be played, and ``task`` has no prompt if the row has none.

    ``Draw(7, Task("draw 7", []), "row 3 of 'rows.jsonl' (train): no image 'a.png'")`` is a bad row.
    """

    number: int
    task: Task
    error: str | None = None
    media: Sequence[MediaItem] = ()
    """The images that had to be downloaded to measure the prompt. While a draw is kept, its episodes do not download them again."""


class PromptLength:
    """Counts the tokens of a task's prompt. Local images are not decoded for it; those with a URL are downloaded.

    ``tools`` returns the tools of a task's env. A prompt that ``Env.reset`` returns instead of the task's own is not known here.
    """

    def __init__(
        self, renderer: Renderer, store: MediaStore | None, tools: Callable[[Task], Sequence[dict[str, Any]]]
    ) -> None:
        self.renderer = renderer
        self.store = store
        self.tools = tools

    def __call__(self, task: Task) -> int:
        """The number of tokens. The calling thread waits for downloads."""
        length, urls = self.local(task)
        return length + sum(self._measured(url) for url in urls)

    def local(self, task: Task, limit: int | None = None) -> tuple[int, list[ImageSource]]:
        """The tokens of the text and of local images, each URL counted as one token; and the URLs.

        Of a text that certainly has more than ``limit`` tokens, which is not encoded whole, a lower bound, and no URLs.
        """
        try:
            rendered = self.renderer.prompt(task.prompt, self.tools(task), limit=limit)
        except TooLongError as error:
            return error.least, []
        urls = [image for image in rendered.images if is_url(image)]
        local = sum(self._measured(image) for image in rendered.images if not is_url(image))
        return len(rendered.token_ids) + local, urls

    async def download(self, urls: Sequence[ImageSource]) -> list[MediaItem]:
        """The items of the images at ``urls``, of which each has ``num_tokens`` - 1 more tokens than :meth:`local` counted."""
        if not urls:
            return []
        assert self.store is not None  # the renderer of a text model refuses images
        return list(await asyncio.gather(*map(self.store.get, urls)))

    def _measured(self, image: ImageSource) -> int:
        """The tokens of an image beyond its placeholder."""
        assert self.store is not None  # the renderer of a text model refuses images
        return self.store.measure(image).num_tokens - 1


class TaskStream:
    """The draws of a run: epoch after epoch, each in its own order. With ``once``, each task once, in the data's order.

    Of a source of 3 tasks, draws 0 to 2 are the first epoch, draws 3 to 5 the second, and so on. A draw's number determines its task
    in every process, so that a resumed run can draw it again.

    Rows are read, generated and measured in a thread of the stream's own, one by one, in at most ``timeout`` seconds each. ``length``
    counts the tokens of prompts for ``data.max_prompt_tokens``; without it nothing is measured.
    """

    def __init__(
        self, tasks: Tasks, length: PromptLength | None = None, *, timeout: float = 60.0, once: bool = False
    ) -> None:
        self.tasks = tasks
        self.drawn = 0  # the number of draws, which is the whole position
        self.too_long = 0  # draws that were skipped because the prompt exceeds data.max_prompt_tokens
        self.skipped: dict[int, str] = {}  # with `once`, the ids of their tasks, by draw
        self._length = length
        self._timeout = timeout
        self._once = once
        self._returned: dict[int, None] = {}  # earlier draws that are claimed again before new ones, in order
        self._loading: set[int] = set()  # draws that were claimed and are not loaded yet
        self._last_fit = -1  # the last draw whose prompt is not too long
        self._thread: WorkPool | None = None  # of size 1, started at its first use

    async def take(self, count: int) -> list[Draw]:
        """The next ``count`` draws whose prompts are not too long, bad rows included. With ``once``, fewer at the end.

        Raises ValueError if ``data.max_prompt_tokens`` skips as many draws in a row as there are tasks.
        """
        taken: list[Draw] = []
        while numbers := [self.claim() for _ in range(self._claimable(count - len(taken)))]:
            loaded = await asyncio.gather(*map(self.load, numbers))
            taken += [draw for draw in loaded if draw is not None]
        return taken

    def claim(self) -> int:
        """The number of the next draw, for :meth:`load`."""
        number = next(iter(self._returned), self.drawn)
        if number in self._returned:
            del self._returned[number]
        else:
            self.drawn += 1
        self._loading.add(number)
        return number

    def give_back(self, numbers: Iterable[int]) -> None:
        """Claim these earlier draws again, before new ones."""
        self._returned |= dict.fromkeys(numbers)

    def is_returned(self, number: int) -> bool:
        """Whether a draw was given back and not claimed since."""
        return number in self._returned

    async def load(self, number: int) -> Draw | None:
        """Draw ``number``, from 0. ``None``: its prompt is too long, which is counted. Raises as :meth:`take`."""
        self._loading.add(number)
        task, where = Task(f"draw {number}", []), ""
        length: int | None = None
        media: list[MediaItem] = []
        try:
            task = await self._in_thread(self.at, number)
            where, limit = f"task {task.id}: ", self.tasks.limit_of(task)
            if limit is not None and self._length is not None:
                length, urls = await self._in_thread(self._length.local, task, limit)
                media = await self._length.download(urls)
                length += sum(item.num_tokens - 1 for item in media)
        except Exception as error:  # of a generator's code, the row, or an image
            return Draw(number, task, where + _reason(error))
        finally:
            self._loading.discard(number)
        if length is not None and limit is not None and length > limit:
            self.too_long += 1
            if self._once:
                self.skipped[number] = task.id
            self._check_progress(length, limit)
            return None
        self._last_fit = max(self._last_fit, number)
        return Draw(number, task, media=media)

    def at(self, number: int) -> Task:
        """The task of draw ``number``, from 0; the stream's position stays. Raises ValueError for a bad row."""
        return self.tasks[number] if self._once else self.tasks.draw(number)

    def state(self) -> dict[str, int]:
        """For a checkpoint: ``{"drawn": 17, "too_long": 0}``."""
        return {"drawn": self.drawn, "too_long": self.too_long}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state`."""
        self.drawn, self.too_long = state["drawn"], state["too_long"]
        self._last_fit = self.drawn - 1

    def close(self) -> None:
        """End the stream's thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def metrics(self) -> dict[str, float]:
        """The tasks drawn and skipped since the run began, and the number of epochs drawn."""
        return {
            "data/drawn": float(self.drawn),
            "data/too_long": float(self.too_long),
            "data/epochs": self.drawn / len(self.tasks),
        }

    def _claimable(self, wanted: int) -> int:
        return min(wanted, len(self.tasks) - self.drawn) if self._once else wanted

    def _check_progress(self, length: int, limit: int) -> None:
        skipped = min(self._loading, default=self.drawn) - 1 - self._last_fit
        if skipped >= len(self.tasks) and not self._once:
            raise ValueError(
                f"data.max_prompt_tokens ({limit}) leaves nothing: {skipped} prompts in a row were longer, the last one {length} "
                "tokens. Raise it, or shrink the images (model.max_image_pixels)."
            )

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """One call in the stream's thread. Raises ValueError if it misses its deadline."""
        if self._thread is None:
            self._thread = WorkPool("data", 1)
        try:
            return await self._thread.run(self._timeout, function, *args)
        except DeadlineError:
            raise ValueError(f"not read within {self._timeout:g} s") from None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
