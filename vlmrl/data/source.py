"""Dataset rows and generators -> :class:`~vlmrl.types.Task`, by configuration alone, and nothing decoded on the way.

tasks = load_tasks(Data("geo.jsonl", columns={"prompt": "problem"}), base_dir)
[tasks[i] for i in tasks.order(epoch=0)]
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmrl.config import Data
from vlmrl.data.files import find, load_rows, task_name
from vlmrl.data.pictures import Pictures, image_parts
from vlmrl.loading import load_object, places
from vlmrl.types import Message, Task

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskSource:
    """Tasks by index, each made when it is asked for; ``order(epoch)`` is the same in every process."""

    size: int
    make: Callable[[int], Task]
    seed: int = 0
    shuffle: bool = True

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"task index {index} is not in 0..{self.size - 1}")
        return self.make(index)

    def order(self, epoch: int) -> list[int]:
        """The indices in the order they are played in this epoch."""
        indices = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(indices)
        return indices


def load_tasks(data: Data, base_dir: Path | None = None) -> TaskSource:
    """The tasks that ``data`` names; local paths are looked for under ``base_dir``, then the working directory.

    Raises:
        ValueError: the data, a mapped column or the generator is not there, or the generator's options do not fit it.
    """
    if data.generator is not None:
        make, size = _generated(data, base_dir), data.size or 0
    else:
        make, size = _rows(data, base_dir)
    return TaskSource(size if data.limit is None else min(size, data.limit), make, data.seed, data.shuffle)


def task_seed(seed: int, index: int) -> int:
    """A 31-bit seed from the data's seed and the task's index, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big") >> 1


# Datasets


def _rows(data: Data, base_dir: Path | None) -> tuple[Callable[[int], Task], int]:
    if data.path is None:
        raise ValueError("data names no tasks: set data.path (a file, a folder, a hub name) or data.generator")
    rows = load_rows(data.path, data.split, base_dir)
    columns = _checked_columns(data, rows.columns)
    local = find(data.path, base_dir)
    name = task_name(local or Path(data.path), data.split)
    own = [] if local is None else [local if local.is_dir() else local.parent]
    roots = [*own, *places(".", base_dir)]

    def make(index: int) -> Task:
        row = rows[index]
        task = Task(f"{name}/{index}", [], source=str(local or data.path), seed=task_seed(data.seed, index))
        where = f"row {index} of {data.path!r} ({data.split})"
        if "answer" in columns and row[columns["answer"]] is None:
            raise ValueError(f"{where}: column {columns['answer']!r} is empty. Give the row an answer, or drop it")
        return _filled(task, row, columns, data.system_prompt, Pictures(where, roots))

    return make, len(rows)


def _checked_columns(data: Data, present: list[str]) -> dict[str, str]:
    """Where prompt, images and answer are. Images and answer may be absent, unless the user said where they are."""
    columns = {"prompt": "prompt", "images": "images", "answer": "answer"} | data.columns
    for name, column in columns.items():
        if column not in present and (name == "prompt" or name in data.columns):
            raise ValueError(
                f"data.columns maps {name!r} to {column!r}, which {data.path!r} does not have. "
                f"Its columns are: {', '.join(present)}"
            )
    return {name: column for name, column in columns.items() if column in present}


# Generators


def _generated(data: Data, base_dir: Path | None) -> Callable[[int], Task]:
    function = load_object(data.generator, base_dir) if isinstance(data.generator, str) else data.generator
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ValueError(f"data.generator {data.generator!r} must name a function(index, seed), not {function!r}")
    try:
        inspect.signature(function).bind(0, 0, **data.options)
    except TypeError as error:
        raise ValueError(
            f"data.generator {name}{inspect.signature(function)} cannot be called as "
            f"{name}(index, seed, **{data.options!r}): {error}. Mend data.options or the function"
        ) from error
    source = data.generator if isinstance(data.generator, str) else name

    def make(index: int) -> Task:
        where, seed = f"task {index} of generator {source!r}", task_seed(data.seed, index)
        made = function(index, seed, **data.options)
        if isinstance(made, Task):
            prompt = _with_system(made.prompt, data.system_prompt)
            return replace(made, prompt=prompt, seed=made.seed or seed, source=made.source or source)
        if not isinstance(made, dict) or "prompt" not in made:
            raise ValueError(f"{where}: it must return a Task or a dict with a prompt, but it returned {made!r}")
        task = Task(f"{name}/{data.seed}/{index}", [], source=source, seed=seed)
        columns = {key: key for key in ("prompt", "images", "answer") if key in made}
        return _filled(task, made, columns, data.system_prompt, Pictures(where, places(".", base_dir)))

    return make


# One row


def _filled(task: Task, row: Row, columns: dict[str, str], system: str | None, pictures: Pictures) -> Task:
    """The task with its prompt, pictures, answer and other columns taken from the row."""
    pictures.take(row[columns["images"]] if "images" in columns else None)
    prompt = _with_system(pictures.placed(row[columns["prompt"]]), system)
    images = [part["image"] for message in prompt for part in image_parts(message)]
    answer = row[columns["answer"]] if "answer" in columns else None
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return replace(task, prompt=prompt, images=images, answer=answer, data=others)


def _with_system(prompt: list[Message], system: str | None) -> list[Message]:
    if system is None or any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]
