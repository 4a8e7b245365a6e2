"""Dataset rows and generators become :class:`~vlmrl.types.Task` by configuration alone; images are not decoded.

tasks = load_tasks(Data("geo.jsonl", columns={"prompt": "problem"}))
[tasks[i] for i in tasks.order(epoch=0)]
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.config import Data
from vlmrl.config.code import local_data, resolve_function
from vlmrl.data.row_images import IMAGE_SUFFIXES, PLAIN_MARK, RowImages, image_parts
from vlmrl.data.row_problems import MARK, has_image, unread_mark
from vlmrl.types import Message, Task
from vlmrl.utils.require import require
from vlmrl.utils.users_line import describe_error

if TYPE_CHECKING:
    from vlmrl.data.dataset_rows import Rows

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskSource:
    """Tasks by index, each made from its row on access, in the same order in every process. A bad row raises ValueError."""

    make: Callable[[int], Task]  # from a row's number
    rows: Sequence[int]  # the row of each task
    seed: int = 0
    shuffle: bool = True
    max_prompt_tokens: int | None = None
    label: Callable[[int], str] = "row {}".format
    """What errors call a row, such as ``row 3 of 'rows.jsonl' (train)``."""
    warnings: Sequence[str] = ()
    """What is suspicious in the rows, such as empty answers."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns of a dataset's ``images`` and ``answer``, as far as it has them."""
    names: Sequence[str] = ()
    """All columns of a dataset."""
    sample_hash: Callable[[Sequence[int]], str] | None = None
    """Of a dataset: :meth:`~vlmrl.data.dataset_rows.Rows.sample_hash`."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"task index {index} is not in 0..{len(self) - 1}")
        return self.make(self.rows[index])

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def order(self, epoch: int) -> Sequence[int]:
        """The task indices in the order of this epoch."""
        return _shuffled(len(self), self.seed, epoch) if self.shuffle else range(len(self))

    def draw(self, number: int) -> Task:
        """The task of draw ``number``, from 0: epoch after epoch, each in its own order."""
        epoch, index = divmod(number, len(self))
        return self[self.order(epoch)[index]]

    def limit_of(self, task: Task) -> int | None:
        """``data.max_prompt_tokens`` for this task."""
        return self.max_prompt_tokens


@functools.lru_cache(maxsize=8)
def _shuffled(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    indices = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return tuple(indices)


def load_tasks(data: Data) -> TaskSource:
    """The tasks that ``data`` names, without those it holds out; see :func:`load_split`."""
    return load_split(data)[0]


def load_split(data: Data, part: str = "") -> tuple[TaskSource, TaskSource | None]:
    """The training tasks of ``data``, and those that it holds out. ``part`` is their name in a mixture.

    Relative paths of images are looked up beside the data, or beside the generator's file, then in the working directory.

    Raises:
        ValueError: the data, a mapped column or the generator does not exist, the generator's options do not fit it, or no rows
            are left to train on.
    """
    everything, ids = _generated(data, part) if data.generator is not None else _dataset(data, part)
    ids = ids[: data.size]
    sides = train_and_held_out(ids, data.held_out)
    if not sides[0] or (data.held_out and not sides[1]):
        raise ValueError(
            f"data.held_out {data.held_out} keeps back {len(sides[1])} of {len(ids)} rows: some must remain on each side."
        )
    train, rest = (replace(everything, rows=rows) for rows in sides)
    return train, rest if data.held_out else None


def train_and_held_out(ids: Sequence[Any], amount: int | float) -> tuple[list[int], list[int]]:
    """The indices of the ids to train on, and those of the held-out ones, which have the lowest hashes.

    ``amount`` is the share of those, or from 1 on their count. A share decides for each id by itself, so that rows added later move no
    earlier row. Rows with the same id stay together.
    """
    every = range(len(ids))
    if not amount:
        return list(every), []
    ranks = [int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:8], "big") for name in ids]
    limit = amount * 2**64 if amount < 1 else sorted(ranks)[: int(amount)][-1] + 1
    return [row for row in every if ranks[row] >= limit], [row for row in every if ranks[row] < limit]


def task_seed(seed: int, index: int) -> int:
    """A 31-bit seed from the data's seed and the task's index, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big") >> 1


MESSAGES_AS_TEXT = re.compile(r"""\s*+\[?\s*+\{\s*["'](role|content|from)["']\s*:""")
TEMPLATED = re.compile(
    r"\s*(<\|(im_start|start_header_id|begin_of_text|system|user)\|>|<start_of_turn>|<bos>|(<s>\s*)?\[INST\]|\[gMASK\]|<｜)"
)
"""How a prompt begins that is written in a chat template."""
ENCODED = re.compile(r"data:image/|iVBORw0KGgo|/9j/|R0lGOD|UklGR.{6}XRUJQ")
"""How a text begins that is a data URI, or the base64 of a PNG, JPEG, GIF or WebP file."""
ENCODED_BYTES = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF.{4}WEBP", re.DOTALL)
"""How such a file begins."""
_IMAGE_FILES = {*IMAGE_SUFFIXES, ".tif", ".tiff", ".heic", ".avif"}
_OF_METADATA = {"file_name", "file_names"}
"""Columns of a metadata file, which name images or other files."""
EMPTY = {"prompt": "the model reads nothing", "answer": "any response contains the answer"}
"""What it means that a row has no prompt, or no answer."""


# Datasets


def _dataset(data: Data, part: str) -> tuple[TaskSource, Sequence[Any]]:
    """The tasks of all rows, and the rows' ids: from their id column, or their indices."""
    if data.path is None:
        raise ValueError("data names no tasks: set data.path (a file, a folder, a hub name) or data.generator")
    from vlmrl.data.files import load_rows, task_name  # here: it imports datasets, which a generator does not need

    rows = load_rows(data.path, data.split)
    rows.add_nested(data.columns.values())
    columns = _checked_columns(data, rows.columns)
    local = local_data(data.path)
    name = task_name(local or Path(data.path), data.split)
    own = [] if local is None else [local if local.is_dir() else local.parent]
    roots = [*own, Path.cwd()]
    ids = rows.column(columns["id"]) if "id" in columns else range(len(rows))

    def label(index: int) -> str:
        return f"row {index} of {data.path!r} ({data.split})"

    def make(index: int) -> Task:
        where = label(index)
        with _naming(where):
            row = rows[index]
            for key in ("id", "source", "answer"):
                if key in columns and row[columns[key]] is None:
                    raise ValueError(f"{where}: column {columns[key]!r} is empty. Fill it, or remove the row")
            source = (
                str(row[columns["source"]])
                if "source" in columns
                else part or (local.name if local else str(data.path))
            )
            task = Task(f"{name}/{ids[index]}", [], source=source, seed=task_seed(data.seed or 0, index), part=part)
            if data.prompt is not None:
                row = {**row, columns["prompt"]: data.prompt}
            return _filled(task, row, columns, data.system_prompt, RowImages(where, roots))

    shown = columns if data.prompt is None else columns | {"prompt": ""}
    found = _source(data, make, label, list(_warnings(rows, shown)))
    read = {name: column for name, column in columns.items() if name in ("images", "answer")}
    return replace(found, columns=read, names=tuple(rows.columns), sample_hash=rows.sample_hash), ids


def _source(
    data: Data, make: Callable[[int], Task], label: Callable[[int], str], warnings: Sequence[str] = ()
) -> TaskSource:
    return TaskSource(make, (), data.seed or 0, data.seed is not None, data.max_prompt_tokens, label, warnings)


def _warnings(rows: Rows, columns: dict[str, str]) -> Iterator[str]:
    for key in EMPTY:
        empty = rows.empty_texts(columns[key]) if columns.get(key) in rows.columns else []
        if empty:
            yield empty_warning(key, f"column {columns[key]!r}", empty)
    prompt = columns["prompt"]
    first = rows.first(prompt) if prompt in rows.columns and "." not in prompt else None
    # As JSON, or as Python prints them, which pandas writes to CSV files.
    if isinstance(first, str) and MESSAGES_AS_TEXT.match(first):
        remedy = "write them as a list, in a JSON or parquet file"
        yield f"column {prompt!r} holds messages written as a text, which the model reads as one: {remedy}"
    if _is_templated(first):
        remedy = "write them as messages without its tokens, or as the text alone"
        yield (
            f"column {prompt!r} holds prompts that are written in a chat template, which the model reads as the text of a "
            f"message: {remedy}"
        )
    if "images" not in columns and (other := _unshown_images(rows, columns, first)):
        yield f"column {other!r} holds images that no prompt shows: map it to images with data.columns, unless the env reads it"
    name = columns.get("answer")
    if name in rows.columns and (whole := rows.whole_floats(name)):
        yield (
            f"column {name!r} holds floats such as {rows[whole[0]][name]} ({named_rows(whole)}): if the file has whole numbers there, "
            "its reader made them floats, since a row is empty, has a fraction, or needs more than 64 bits. Write answers as texts"
        )


def _is_templated(prompt: Any) -> bool:
    """Whether a prompt, or its first message, begins with a token of a chat template."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    text = first.get("content") if isinstance(first, dict) else first
    return isinstance(text, str) and TEMPLATED.match(text) is not None


def is_called_image(column: str) -> bool:
    """Whether a column is called as those that hold images are."""
    return column.lower().startswith(("image", "img", "picture", "photo", "screenshot"))


def _holds_image(column: str, value: Any) -> bool:
    """Whether a cell is an encoded image or a list of them, or in a column that is called so the path or URL of one."""
    value = next(iter(value), None) if isinstance(value, list) else value
    if isinstance(value, dict) and "bytes" in value:  # as `datasets` stores images, audio and videos
        name, value = str(value.get("path")), value["bytes"]
        if Path(name).suffix.lower() in _IMAGE_FILES:
            return True
    is_called = is_called_image(column) or column in _OF_METADATA
    if isinstance(value, bytes):
        return is_called or ENCODED_BYTES.match(value) is not None
    if not isinstance(value, str):
        return False
    is_address = Path(value).suffix.lower() in _IMAGE_FILES or re.match("https?://", value)
    return ENCODED.match(value) is not None or (is_called and bool(is_address))


def _unshown_images(rows: Rows, columns: dict[str, str], first: Any) -> str | None:
    """The first unmapped column with images, by its type or its first cell; None if the ``first`` prompt shows one of its own."""
    others = set(rows.columns).difference(columns.values())
    if columns["prompt"] in rows.columns:
        messages = first if isinstance(first, list) and all(isinstance(each, dict) for each in first) else None
        if not isinstance(first, str) and (
            messages is None or any(has_image(each.get("content")) for each in messages)
        ):
            return None
    plain = (name for name in rows.columns if name in others and "." not in name)
    return next((name for name in plain if rows.declares_images(name) or _holds_image(name, rows.first(name))), None)


def empty_warning(key: str, what: str, rows: Sequence[int]) -> str:
    """``column 'answer' is empty in row 3: any response contains the answer``; ``key`` is that of :data:`EMPTY`."""
    return f"{what} is empty in {named_rows(rows)}: {EMPTY[key]}"


def named_rows(numbers: Sequence[int]) -> str:
    """``row 3``, or ``412 rows: 0, 3, 7, 9, 12, ...``."""
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"row {shown}" if len(numbers) == 1 else f"{len(numbers)} rows: {shown}"


def _checked_columns(data: Data, present: list[str]) -> dict[str, str]:
    """The column of each field. Only the prompt and the fields that ``data.columns`` maps must exist."""
    columns = {"prompt": "prompt", "images": "images", "answer": "answer"} | data.columns
    for name, column in columns.items():
        if name == "prompt" and data.prompt is not None:
            require(name not in data.columns, "data.columns", "without prompt if data.prompt is set", data.columns)
        elif column not in present and (name == "prompt" or name in data.columns):
            what = f"data.columns maps {name!r} to {column!r}, which {data.path!r} does not have"
            if name not in data.columns:
                what = f"{data.path!r} has no column 'prompt': set data.columns prompt COLUMN, or data.prompt"
            raise ValueError(f"{what}. Its columns are: {', '.join(present)}")
    if data.prompt is not None and MARK in data.prompt and columns["images"] not in present:
        raise ValueError(
            f"data.prompt has the mark {MARK}, but {data.path!r} has no images: its columns are {', '.join(present)}. Map one with "
            "data.columns images COLUMN. If a folder of images has a .csv, .json, .jsonl or .parquet file, too, that is not called "
            "metadata, the file's rows are read: move it elsewhere."
        )
    given = set() if data.prompt is None else {"prompt"}
    return {name: column for name, column in columns.items() if column in present or name in given}


# Generators


def _generated(data: Data, part: str) -> tuple[TaskSource, Sequence[Any]]:
    assert data.generator is not None
    function = resolve_function(
        "data.generator", data.generator, ["index", "seed"], data.options, options_field="data.options"
    )
    name = getattr(function, "__name__", type(function).__name__)
    source = part or name
    roots = [*_own_folder(function), Path.cwd()]

    def label(index: int) -> str:
        return f"task {index} of generator {name!r}"

    def make(index: int) -> Task:
        where, seed = label(index), task_seed(data.seed or 0, index)
        with _naming(where):
            made = function(index, seed, **data.options)
            if isinstance(made, Task):
                _check_last(where, made.prompt)
                prompt = _with_system(made.prompt, data.system_prompt)
                return replace(made, prompt=prompt, seed=made.seed or seed, source=made.source or source, part=part)
            made, columns = _mapped(made, data.columns) if isinstance(made, dict) else (made, {})
            if "prompt" not in columns:
                shown = (
                    f"a dict with the keys {', '.join(map(repr, made))}" if isinstance(made, dict) else f"{made!r:.200}"
                )
                raise ValueError(f"{where}: it must return a Task or a dict with a prompt, but it returned {shown}")
            own = str(made[columns["source"]]) if "source" in columns else source
            task = Task(f"{name}/{data.seed or 0}/{index}", [], source=own, seed=seed, part=part)
            return _filled(task, made, columns, data.system_prompt, RowImages(where, roots))

    return _source(data, make, label), range(data.size or 0)


def _mapped(made: Row, columns: dict[str, str]) -> tuple[Row, dict[str, str]]:
    """What a generator made, and the key of each field in it: that of ``data.columns``, or else, as these may be meant for
    ``eval.data``, its own name. A field of a dict, such as ``reward_model.ground_truth``, gets a key."""
    for column in set(columns.values()) - made.keys():
        value: Any = made
        for key in column.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        made = made if value is None else {**made, column: value}
    names = {"prompt": "prompt", "images": "images", "answer": "answer"}
    given = {name: column for name, column in columns.items() if column in made and name != "id"}
    return made, {name: key for name, key in names.items() if key in made} | given


def _own_folder(function: Callable[..., Any]) -> list[Path]:
    """The folder of the file that defines a function, or the class of a callable object; none if there is no such file."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
    except TypeError:  # a built-in
        file = None
    return [Path(file).resolve().parent] if file else []


# One row


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Within the context, any error becomes a ValueError that names the row."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {describe_error(error)}") from error


def _filled(task: Task, row: Row, columns: dict[str, str], system: str | None, row_images: RowImages) -> Task:
    """The task with its prompt, images, answer and other columns taken from the row."""
    row_images.set_column(row[columns["images"]] if "images" in columns else None)
    prompt = _with_system(row_images.messages(row[columns["prompt"]]), system)
    _check_last(row_images.where, prompt)
    if problem := unread_mark(prompt, row):
        raise ValueError(f"{row_images.where}: {problem}.")
    if "images" not in columns:
        _check_marks(row_images.where, prompt, row)
    elif not row_images.sources:  # as in a file of two datasets, of which one has another column
        _check_marks(
            row_images.where, prompt, {name: row[name] for name in row if name not in columns.values() and row[name]}
        )
    images = [part["image"] for message in prompt for part in image_parts(message)]
    answer = row[columns["answer"]] if "answer" in columns else None
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return replace(task, prompt=prompt, images=images, answer=answer, data=others)


def _check_marks(where: str, prompt: list[Message], row: Row) -> None:
    """Raises ValueError for a mark in a row without ``images`` and without images in its prompt, whose images have another name."""
    listed = (name for name in _OF_METADATA.intersection(row) if _holds_image(name, row[name]))
    other = next(filter(is_called_image, row), next(listed, None))
    if other is None or any(image_parts(message) for message in prompt):
        return
    if any(message["role"] == "user" and MARK in message["content"] for message in prompt):
        found = f"has no 'images', only {', '.join(map(repr, row))}"
        raise ValueError(
            f"{where}: the prompt has the mark {MARK}, but the row {found}: rename {other!r} to 'images', or map "
            f"the column: data.columns={{'images': {other!r}}}. {PLAIN_MARK}"
        )


def _check_last(where: str, prompt: list[Message]) -> None:
    if prompt and prompt[-1].get("role") == "assistant":
        raise ValueError(
            f"{where}: a prompt must end with the message that the model answers, but its last message has the role assistant: it "
            "is the answer. Remove that message from the prompt, or move its text to the answer column"
        )


def _with_system(prompt: list[Message], system: str | None) -> list[Message]:
    if system is None or any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]
