"""The training and evaluation tasks of a run: from one source, or from several mixed by weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from vlmrl.config import Config, Data, EvalData
from vlmrl.config.checks import check_unread, refuse_if
from vlmrl.data.source import TaskSource, is_called_image, load_split
from vlmrl.types import Task


@dataclass(frozen=True)
class TaskMixture:
    """Several sources, drawn in the ratio of their weights; after any number of draws the counts are right to within about one.

    With weights 2 and 1 the draws are ``a b a a b a a b a ...``: of each three draws, two are from ``a``.
    """

    parts: Mapping[str, TaskSource]
    weights: Mapping[str, float]

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __getitem__(self, index: int) -> Task:
        """The task at ``index`` of the parts one after the other."""
        before = 0
        for source in self.parts.values():
            if before <= index < before + len(source):
                return source[index - before]
            before += len(source)
        raise IndexError(f"task index {index} is not in 0..{before - 1}")

    def __iter__(self) -> Iterator[Task]:
        return chain.from_iterable(self.parts.values())

    def draw(self, number: int) -> Task:
        """The task of draw ``number``, from 0; each part has its own epochs."""
        drawn = self._drawn_before(number)
        name = self._next(drawn)
        return self.parts[name].draw(drawn[name])

    def limit_of(self, task: Task) -> int | None:
        """``data.max_prompt_tokens`` of the task's part."""
        return self.parts[task.part].max_prompt_tokens

    def _next(self, drawn: Mapping[str, int]) -> str:
        """The part to draw next: a part's draw k is due at time (k + 1/2) / weight (Webster's method)."""
        return min(self.parts, key=lambda name: (drawn[name] + 0.5) / self.weights[name])

    def _drawn_before(self, number: int) -> dict[str, int]:
        """The draws of each part before draw ``number``: those due by a slightly too early time at once, then one by one."""
        early = max(0, number - len(self.parts)) / sum(self.weights.values())
        drawn = {name: math.floor(early * self.weights[name] + 0.5) for name in self.parts}
        while sum(drawn.values()) < number:
            drawn[self._next(drawn)] += 1
        return drawn


Tasks = TaskSource | TaskMixture


def contents(name: str, tasks: Tasks | None, earlier: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
    """How many rows each dataset in ``tasks`` has, and a hash of some of them: ``{"data": "1200 rows, of content 3fa9c2d1"}``.

    Other rows or another order change it; one row that was edited, only if it is among the hashed ones. ``earlier``: what this
    function returned before. Of such a dataset the first rows are described, as many as there were.
    """
    parts = {f"{name}.{part}": source for part, source in tasks.parts.items()} if isinstance(tasks, TaskMixture) else {}
    found = {}
    for each, source in (parts or ({name: tasks} if isinstance(tasks, TaskSource) else {})).items():
        if source.sample_hash is not None:
            count = re.match(r"\d{1,12}(?= rows)", str(earlier.get(each)))
            rows = source.rows[: int(count[0])] if count else source.rows
            found[each] = f"{len(rows)} rows, of content {source.sample_hash(rows)}"
    return found


def load_run_tasks(config: Config) -> tuple[Tasks, Tasks | None]:
    """The training tasks, and the evaluation tasks if there are any.

    Raises ValueError if the config names no tasks, or has settings of data that nothing reads.
    """
    check_unread(config.data, config.eval.data, config.mixture)
    if not config.mixture:
        if not config.data.is_set:
            raise ValueError("data must be set: give it a path or a generator, or mix several datasets with mixture.")
        return _load(config.data, config.eval.data)
    loaded = {name: _load(part.data, part.eval_data, name) for name, part in config.mixture.items()}
    weights = {name: part.weight for name, part in config.mixture.items()}
    held_out = {name: tasks for name, (_, tasks) in loaded.items() if tasks is not None}
    mixed = TaskMixture({name: tasks for name, (tasks, _) in loaded.items()}, weights)
    return mixed, TaskMixture(held_out, weights) if held_out else None


def _load(data: Data, eval_data: EvalData, part: str = "") -> tuple[TaskSource, TaskSource | None]:
    tasks, held_out = load_split(data, part)
    if not eval_data.is_set:
        return tasks, held_out
    read, name = data.with_rows(eval_data), f"mixture.{part}.eval_data" if part else "eval.data"
    trains_on_all = data.generator is None and data.size is None and "[" not in data.split
    if _rows_of(read) == _rows_of(data) or (trains_on_all and _rows_of(read, whole=True) == _rows_of(data)):
        remedy = f"{name}.seed" if data.generator is not None else f"{name}.split to another one, or held_out instead"
        warning = f"{name} has the tasks that are trained on, so that no evaluation is of held-out ones: set {remedy}"
        tasks = replace(tasks, warnings=[*tasks.warnings, warning])
    other = load_split(read, part)[0]
    for field, column in tasks.columns.items() if eval_data.path is not None else ():
        # Tasks without images may be evaluated, too, if no column has them under another name.
        is_read = field in other.columns or (field == "images" and not any(map(is_called_image, other.names)))
        has = f"but {eval_data.path!r} has {', '.join(other.names)}: rename its column"
        refuse_if(
            not is_read, f"{name}.path must be a dataset with a column {column!r} for {field}, as that of data, {has}."
        )
    return tasks, other


def _rows_of(data: Data, whole: bool = False) -> tuple[Any, ...]:
    """The settings that decide which rows there are, whatever their number and order; ``whole``: of the split that has a slice."""
    if data.generator is not None:
        return data.generator, data.options, data.seed or 0
    return data.path, data.split.partition("[")[0] if whole else data.split
