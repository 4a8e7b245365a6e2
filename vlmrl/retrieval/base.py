"""What is retrieved, and the one method a retriever has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vlmrl.types import ImageSource


class RetrieverError(RuntimeError):
    """A retriever that gave no answer: no fault of the query, so an env lets it through and is tried again."""


@dataclass(frozen=True)
class Passage:
    """A piece of a corpus: ``Passage("12", "Paris", "Paris is the capital of France.")``, with an image or without."""

    id: str
    title: str
    text: str
    image: ImageSource = None


@dataclass(frozen=True)
class Hit:
    """A passage that was found. Scores compare within one query: the higher, the better."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Searches a corpus of so many ``passages`` (``None``: not known). Any number of threads may call it at once; equal queries
    get equal answers."""

    name: str
    passages: int | None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` hits, best first; fewer, or none, where nothing fits.

        Raises RetrieverError where no answer can be had.
        """


class Nothing:
    """Finds nothing, whatever is asked: the control that shows what is learnt without reading."""

    name = "nothing"
    passages: int | None = 0

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [[] for _ in queries]
