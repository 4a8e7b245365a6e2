"""A corpus of passages: a file, a hub dataset or a function's rows, read from disk as they are asked for.

    corpus = load_corpus("wiki.jsonl")     # {"id": "12", "title": "Paris", "text": "Paris is ..."} a line
    corpus[0]                              # Passage("12", "Paris", "Paris is ...")

A row has ``text``, or ``contents`` with the title in its first line, as the field's corpora of Wikipedia do; ``id`` (or ``_id``),
``title`` and ``image`` where it has them. The path of an image is relative to the corpus file's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets as hf

from vlmrl.config.code import load_object, local_data
from vlmrl.data.files import Rows, load_rows
from vlmrl.retrieval.base import Hit, Passage
from vlmrl.types import ImageSource

Places = list[tuple[int, float]]
"""For one query: the numbers of passages, best first, and their scores."""


class Corpus:
    """Passages by number, memory-mapped. Relative paths of images are in ``folder``."""

    def __init__(self, rows: Rows, name: str, folder: Path | None = None) -> None:
        if not {"text", "contents"} & set(rows.columns):
            raise ValueError(
                f"corpus {name} must have a column text or contents, but its columns are: {', '.join(rows.columns)}"
            )
        self.name = name
        self._rows = rows
        self._folder = folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Passage:
        return self._passage(index, self._rows[index])

    def take(self, indices: list[int]) -> list[Passage]:
        """Passages by number, read together."""
        return list(map(self._passage, indices, self._rows.take(indices)))

    def texts(self) -> Iterator[str]:
        """Each passage as a retriever reads it: the title, if there is one, on a line of its own before the text."""
        for index, row in enumerate(self._rows):
            passage = self._passage(index, row)
            yield f"{passage.title}\n{passage.text}" if passage.title else passage.text

    def digest(self) -> str:
        """A hash of all its content."""
        return self._rows.digest()

    def _passage(self, index: int, row: dict[str, Any]) -> Passage:
        title, text = row.get("title"), row.get("text")
        if text is None:
            title, _, text = (row.get("contents") or "").partition("\n")
        id = next((row[key] for key in ("id", "_id") if row.get(key) is not None), index)
        return Passage(str(id), (title or "").strip().strip('"'), text.strip(), self._located(row.get("image")))

    def _located(self, image: ImageSource) -> ImageSource:
        """An image's source, a relative path made absolute."""
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        is_path = isinstance(image, str) and not image.startswith(("http://", "https://", "data:"))
        return str(self._folder / image) if is_path and self._folder is not None else image


def hits(corpus: Corpus, found: Sequence[Places]) -> list[list[Hit]]:
    """What was found for each query, with its passages: those of all queries are read together."""
    passages = iter(corpus.take([place for places in found for place, _ in places]))
    return [[Hit(next(passages), score) for _, score in places] for places in found]


def load_corpus(source: str, split: str = "train") -> Corpus:
    """The corpus in a file or folder (jsonl, json, parquet), in a hub dataset, or what a function without arguments,
    ``file.py:function``, returns as a list of rows. Paths are relative to the working directory.

    Raises:
        ValueError: nothing is there, or it has no passages.
    """
    if ".py:" in source:
        rows = load_object(source)()
        if not rows:
            raise ValueError(f"corpus {source!r} returned no rows")
        return Corpus(Rows(hf.Dataset.from_list(rows)), source)
    try:
        local = local_data(source)
        folder = None if local is None else local if local.is_dir() else local.parent
        return Corpus(load_rows(source, split), source, folder)
    except ValueError as error:
        raise ValueError(str(error).replace("data.path", "corpus").replace("data.split", "split")) from error
