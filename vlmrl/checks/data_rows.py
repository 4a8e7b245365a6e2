"""Reads every row of a dataset as a run would: its prompt, its answer and each of its images, which are decoded and resized."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from vlmrl.data import PromptLength, TaskSource
from vlmrl.data.row_problems import MARK
from vlmrl.data.source import EMPTY, named_rows
from vlmrl.multimodal.fetch import is_url
from vlmrl.multimodal.images import ImageError, describe
from vlmrl.multimodal.messages import parts_of_message
from vlmrl.types import Task
from vlmrl.utils.work_pool import cpu_pool


@dataclass
class RowsReport:
    """What :func:`check_rows` found. ``lengths``: tokens of each prompt; ``images``: number of images of each row."""

    lengths: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    resized: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Rows that cannot be played, by their number, each with what is wrong."""
    empty: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in EMPTY})
    """Rows with a blank prompt or answer."""
    marks_left: list[int] = field(default_factory=list)
    """Rows whose prompt has more ``<image>`` marks than the row has images."""
    no_answer: list[int] = field(default_factory=list)
    """Rows whose ``task.answer`` is ``None``."""


def check_rows(source: TaskSource, count: int, length: PromptLength, advance: Callable[[], object]) -> RowsReport:
    """Read the first ``count`` rows. ``advance`` is called after each.

    Rows are read one by one; their images are processed in the threads of :func:`cpu_pool`, those of a few rows at a time, so that the
    memory does not depend on the number of rows.
    """
    report = RowsReport()

    async def run() -> None:
        room = asyncio.Semaphore(2 * cpu_pool().size)

        async def check(row: int, task: Task, tokens: int) -> None:
            try:
                await _check_images(report, source.label(row), row, task, tokens, length)
            finally:
                room.release()
                advance()

        async with asyncio.TaskGroup() as checks:
            for row in source.rows[:count]:
                await room.acquire()
                try:
                    task = source.make(row)
                    tokens = length.local(task)[0]
                except Exception as error:  # a chat template raises errors of many kinds for a content of another type
                    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                    report.broken.append((row, _located(source.label(row), reason)))
                    room.release()
                    advance()
                    continue
                _note_texts(report, row, task)
                checks.create_task(check(row, task, tokens))

    asyncio.run(run())
    report.broken.sort()
    return report


def grouped(source: TaskSource, broken: list[tuple[int, str]]) -> list[str]:
    """What is wrong with the broken rows, those with the same error in one text: ``row 0: ... (3 rows: 0, 4, 7)``."""
    same: dict[str, list[int]] = {}
    for row, problem in broken:
        same.setdefault(problem.removeprefix(source.label(row)), []).append(row)
    return [
        source.label(rows[0]) + reason + (f" ({named_rows(rows)})" if len(rows) > 1 else "")
        for reason, rows in same.items()
    ]


async def _check_images(
    report: RowsReport, label: str, row: int, task: Task, tokens: int, length: PromptLength
) -> None:
    urls = 0
    for number, image in enumerate(task.images, start=1):
        assert length.store is not None  # the renderer of a text model refuses images
        try:
            item = await length.store.get(image)
            if is_url(image):
                urls += item.num_tokens - 1
            else:
                size = await cpu_pool().run(60.0, length.store.measure, image)
                report.resized += size.given != size.shown
        except ImageError as error:
            reason = error.__cause__ or error.reason or error
            report.broken.append((row, f"{label}: image {number} ({describe(image)}): {reason}"))
            return
    report.lengths.append(tokens + urls)
    report.images.append(len(task.images))


def _note_texts(report: RowsReport, row: int, task: Task) -> None:
    shown = [parts_of_message(message) for message in task.prompt if message["role"] != "system"]
    text = "".join(str(part.get("text", "")) for parts in shown for part in parts)
    if not task.images and not text.strip():
        report.empty["prompt"].append(row)
    if MARK in text:  # those that mark an image are parts of their own by now
        report.marks_left.append(row)
    if task.answer is None:
        report.no_answer.append(row)
    if isinstance(task.answer, str) and not task.answer.strip():
        report.empty["answer"].append(row)


def _located(label: str, message: str) -> str:
    return message if message.startswith(label) else f"{label}: {message}"
