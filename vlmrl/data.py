"""Dataset rows and generators -> :class:`~vlmrl.types.Task`, by configuration alone, and nothing decoded on the way.

    tasks = load_tasks(Data("geo.jsonl", columns={"prompt": "problem"}), base_dir)
    [tasks[i] for i in tasks.order(epoch=0)]

How a prompt takes its row's pictures, always in the row's order:

- a string is a user message, and ``<image>`` in it marks a picture, but only as often as the row has pictures; later
  ones are prose. Pictures without a mark go first: ``"<image> and this"`` with pictures a, b is a, b, ``" and this"``;
- in a list of messages ``{"type": "image"}`` parts without a source take the pictures; user messages whose content is a
  string are marked likewise.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets as hf
import PIL.Image

from vlmrl.config import Data
from vlmrl.loading import load_object, places, resolve_path
from vlmrl.types import ImageSource, Message, Task

MARK = "<image>"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_OWN_SOURCE = ("image", "url", "path", "base64", "image_url")
_SPLIT_NAMES = {"train", "validation", "val", "valid", "dev", "test"}

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
    local = _find(data.path, base_dir)
    dataset = _load_local(local, data.split) if local else _load_hub(data.path, data.split, base_dir)
    features = hf.Features({name: _undecoded(feature) for name, feature in dataset.features.items()})
    columns = _checked_columns(data, dataset.column_names)
    table = dataset.with_format("arrow")
    name = _task_name(local or Path(data.path), data.split)
    own = [] if local is None else [local if local.is_dir() else local.parent]
    roots = [*own, *places(".", base_dir)]

    def make(index: int) -> Task:
        row = features.decode_example(table[index].to_pylist()[0])
        task = Task(f"{name}/{index}", [], source=str(local or data.path), seed=task_seed(data.seed, index))
        where = f"row {index} of {data.path!r} ({data.split})"
        if "answer" in columns and row[columns["answer"]] is None:
            raise ValueError(f"{where}: column {columns['answer']!r} is empty. Give the row an answer, or drop it")
        return _filled(task, row, columns, data.system_prompt, _Pictures(where, roots))

    return make, len(dataset)


def _find(path: str, base_dir: Path | None) -> Path | None:
    """The local file or folder, or ``None`` where ``path`` can only be a hub name."""
    if any(place.exists() for place in places(path, base_dir)):
        return resolve_path(path, base_dir)
    if Path(path).suffix in FORMATS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        looked = ", ".join(map(str, places(path, base_dir)))
        raise ValueError(f"data.path {path!r} does not exist. Looked at: {looked}")
    return None


def _load_hub(path: str, split: str, base_dir: Path | None) -> hf.Dataset:
    try:
        return hf.load_dataset(path, split=split)
    except OSError as error:  # not found, offline, not allowed: all of them are OSErrors
        looked = ", ".join(map(str, places(path, base_dir)))
        message = f"data.path {path!r} is nothing local (looked at: {looked}), and the hub says: {error}"
        raise ValueError(message) from error


def _load_local(path: Path, split: str) -> hf.Dataset:
    if path.is_file():
        return _load_files([path], split)
    if not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _load_files(_files_of_split(path, split), split)
    saved = hf.load_from_disk(str(path))
    if isinstance(saved, hf.Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"data.split {split!r} is not in {path}, which has: {', '.join(saved)}")
    return saved[split]


def _load_files(paths: list[Path], split: str) -> hf.Dataset:
    """One split from files, whatever these are called; ``split`` may be a slice such as ``train[:100]``."""
    suffixes = {path.suffix for path in paths}
    if not suffixes <= set(FORMATS):
        raise ValueError(f"data.path must be one of {', '.join(FORMATS)} or a folder, but it is {str(paths[0])!r}")
    files = {_base(split): [str(path) for path in paths]}
    return hf.load_dataset(FORMATS[suffixes.pop()], data_files=files, split=split)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The files with the split's name as a word in theirs; ``train`` also takes all where none names a split."""
    files = next((found for suffix in FORMATS if (found := sorted(folder.rglob(f"*{suffix}")))), [])
    words = {file: set(re.split(r"[-_./]", str(file.relative_to(folder)))) for file in files}
    named = [file for file in files if _base(split) in words[file]]
    if not named and _base(split) == "train" and not any(words[file] & _SPLIT_NAMES for file in files):
        named = files
    if not named:
        has = ", ".join(str(file.relative_to(folder)) for file in files[:10]) or f"no {', '.join(FORMATS)} file"
        raise ValueError(f"data.split {split!r} names no file in {folder}, which has: {has}")
    return named


def _base(split: str) -> str:
    return re.split(r"[\[+]", split)[0]


def _task_name(path: Path, split: str) -> str:
    """``geo/train.parquet`` and the split ``train`` of ``geo`` are both ``geo/train``."""
    return f"{path.parent.name}/{path.stem}" if path.suffix in FORMATS else f"{path.name}/{split}"


def _undecoded(feature: Any) -> Any:
    """The feature with every picture in it, however deep, left as ``{"bytes": ..., "path": ...}``."""
    if isinstance(feature, hf.Image):
        return hf.Image(mode=feature.mode, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, hf.List):
        return hf.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, hf.LargeList):
        return hf.LargeList(_undecoded(feature.feature))
    return feature


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
        return _filled(task, made, columns, data.system_prompt, _Pictures(where, places(".", base_dir)))

    return make


# One row


def _filled(task: Task, row: Row, columns: dict[str, str], system: str | None, pictures: _Pictures) -> Task:
    """The task with its prompt, pictures, answer and other columns taken from the row."""
    pictures.take(row[columns["images"]] if "images" in columns else None)
    prompt = _with_system(pictures.placed(row[columns["prompt"]]), system)
    images = [part["image"] for message in prompt for part in _image_parts(message)]
    answer = row[columns["answer"]] if "answer" in columns else None
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return replace(task, prompt=prompt, images=images, answer=answer, data=others)


def _with_system(prompt: list[Message], system: str | None) -> list[Message]:
    if system is None or any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _image_parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if part.get("type") == "image"] if isinstance(content, list) else []


class _Pictures:
    """Puts one row's pictures into its prompt. ``where`` names the row in errors; paths are found in ``roots``."""

    def __init__(self, where: str, roots: list[Path]) -> None:
        self.where = where
        self.roots = list(dict.fromkeys(roots))
        self.sources: list[ImageSource] = []

    def take(self, column: Any) -> None:
        """The row's image column: nothing, one picture, or a list of pictures."""
        given = [] if column is None else list(column) if isinstance(column, (list, tuple)) else [column]
        self.sources = [self._located(source) for source in given]

    def placed(self, prompt: Any) -> list[Message]:
        """The prompt as messages, with every image part ``{"type": "image", "image": source}``."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [self._message(message) for message in self._checked(prompt)]
        marked = [message for message in messages if message["role"] == "user" and isinstance(message["content"], str)]
        bare = sum("image" not in part for message in messages for part in _image_parts(message))
        marks = min(sum(message["content"].count(MARK) for message in marked), max(0, len(self.sources) - bare))
        unmarked = len(self.sources) - bare - marks
        if unmarked < 0 or (unmarked and (bare or not marked)):
            raise ValueError(
                f"{self.where}: {len(self.sources)} pictures for {bare} image parts without a source and {marks} "
                f"{MARK} marks in the prompt. Make the numbers agree"
            )
        self._fill(messages, marks, unmarked)
        return messages

    def _fill(self, messages: list[Message], marks: int, unmarked: int) -> None:
        """Hand out the pictures in order: to bare parts, to marks, and before the first user text what has no mark."""
        queue = iter(self.sources)
        for message in messages:
            for part in _image_parts(message):
                if "image" not in part:
                    part["image"] = next(queue)
            if message["role"] == "user" and isinstance(message["content"], str) and (marks or unmarked):
                pieces = message["content"].split(MARK, marks)
                marks -= len(pieces) - 1
                message["content"] = _interleaved(pieces, queue, unmarked)
                unmarked = 0

    def _checked(self, prompt: Any) -> list[Message]:
        fits = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and m.get("role") for m in prompt)
        if not fits:
            raise ValueError(f"{self.where}: the prompt must be a string or a list of messages, not {prompt!r:.200}")
        return prompt

    def _message(self, message: Message) -> Message:
        """A copy without the empty keys that columnar files add, its image parts in one form."""
        made = {key: value for key, value in message.items() if value is not None}
        content = made.setdefault("content", "")
        if isinstance(content, list):
            made["content"] = [self._part(part) for part in content]
        return made

    def _part(self, part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        made = {key: value for key, value in part.items() if value is not None}
        if made.get("type") not in ("image", "image_url"):
            return made
        key = next((key for key in _OWN_SOURCE if key in made), None)
        if key is None:
            return {"type": "image"}
        source = made[key]
        if key == "image_url":
            source = source["url"] if isinstance(source, dict) else source
        return {"type": "image", "image": base64.b64decode(source) if key == "base64" else self._located(source)}

    def _located(self, source: ImageSource) -> ImageSource:
        """The source, a relative path made absolute: under the data's own folder, ``base_dir``, or the working one."""
        if isinstance(source, dict) and source.get("bytes") is not None:
            return source
        path = source.get("path") if isinstance(source, dict) else source
        if isinstance(path, (bytes, PIL.Image.Image)):
            return path
        if not isinstance(path, (str, Path)):
            raise ValueError(f"{self.where}: a picture must be bytes, a path, a URL or a PIL image, not {source!r:.80}")
        if re.match(r"data:|[a-z0-9]+://", str(path)):
            return path
        tried = list(dict.fromkeys(str(root / Path(path).expanduser()) for root in self.roots))
        found = next(filter(os.path.isfile, tried), None)
        if found is None:
            raise ValueError(f"{self.where}: no picture {str(path)!r:.200}. Looked at: {', '.join(tried):.1000}")
        return found


def _interleaved(pieces: list[str], queue: Iterator[ImageSource], unmarked: int) -> list[dict[str, Any]]:
    """``["a ", " b"]`` with one picture unmarked: picture, ``"a "``, picture, ``" b"``; empty texts are left out."""
    parts = [{"type": "image", "image": next(queue)} for _ in range(unmarked)]
    for index, piece in enumerate(pieces):
        if index:
            parts.append({"type": "image", "image": next(queue)})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts
