"""A corpus of passages: a file, a hub dataset or a function's rows, read from disk when they are needed.

    corpus = load_corpus("wiki.jsonl")     # {"id": "12", "title": "Paris", "text": "Paris is ..."} a line
    corpus[0]                              # Passage("12", "Paris", "Paris is ...")

A row has ``text``, or ``contents`` with the title in its first line, as in the usual corpora of Wikipedia. ``id`` (or ``_id``),
``title`` and ``image`` are optional. A relative image path starts at the corpus file's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.config.code import load_object
from vlmrl.retrieval.base import Hit, Passage
from vlmrl.types import ImageSource

if TYPE_CHECKING:
    from vlmrl.data.dataset_rows import Rows

Ranking = list[tuple[int, float]]
"""The result of one query: passage numbers, best first, with their scores."""


class Corpus:
    """Passages by number, memory-mapped. Relative image paths start at ``folder``."""

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
        """Passages by number, in one read."""
        return list(map(self._passage, indices, self._rows.take(indices)))

    def texts(self) -> Iterator[str]:
        """Each passage as it is indexed: the title, if there is one, on a line of its own before the text."""
        for index, row in enumerate(self._rows):
            passage = self._passage(index, row)
            yield f"{passage.title}\n{passage.text}" if passage.title else passage.text

    def digest(self) -> str:
        """A hash of all content."""
        return self._rows.digest()

    def hits(self, rankings: Sequence[Ranking]) -> list[list[Hit]]:
        """The rankings of several queries as hits. All passages are read together."""
        passages = iter(self.take([index for ranking in rankings for index, _ in ranking]))
        return [[Hit(next(passages), score) for _, score in ranking] for ranking in rankings]

    def _passage(self, index: int, row: dict[str, Any]) -> Passage:
        title, text = row.get("title"), row.get("text")
        for name in ("title", "text", "contents"):
            if not isinstance(row.get(name), str | None):
                raise ValueError(
                    f"corpus {self.name}, row {index}: {name} must be a text, but it is {row[name]!r:.80}."
                )
        if text is None:
            title, _, text = (row.get("contents") or "").partition("\n")
        id = next((row[key] for key in ("id", "_id") if row.get(key) is not None), index)
        return Passage(str(id), (title or "").strip().strip('"'), text.strip(), self._locate(row.get("image")))

    def _locate(self, image: ImageSource) -> ImageSource:
        """An image source with an absolute path."""
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        is_path = isinstance(image, str) and not image.startswith(("http://", "https://", "data:"))
        return str(self._folder / image) if is_path and self._folder is not None else image


def load_corpus(source: str, split: str = "train") -> Corpus:
    """The corpus in a file or folder (jsonl, json, parquet), in a hub dataset, or in the list of rows that a function returns.

    The function, ``file.py:function``, has no arguments.

    Raises:
        ValueError: the source does not exist, or it has no passages.
    """
    import datasets as hf  # here, with what else imports torch, since an env file that searches also imports this module

    from vlmrl.data.dataset_rows import Rows
    from vlmrl.data.files import load_rows

    if ".py:" in source:
        rows = load_object(source)()
        if not rows:
            raise ValueError(f"corpus {source!r} returned no rows")
        return Corpus(Rows(hf.Dataset.from_list(rows)), source)
    try:
        rows = load_rows(source, split)
    except ValueError as error:
        raise ValueError(str(error).replace("data.path", "corpus").replace("data.split", "split")) from error
    path = Path(source).expanduser().resolve()
    return Corpus(rows, source, path if path.is_dir() else path.parent if path.exists() else None)
