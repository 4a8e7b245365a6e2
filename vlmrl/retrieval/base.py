"""The interface of retrievers: passages, the one method, batching of queries, and the folder of the index."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vlmrl.types import ImageSource
from vlmrl.utils.folders import build_folder, cache_root

TURN_SECONDS = 0.02  # after which a caller that waits for its turn looks whether it has its answer
LONGEST_QUERY = 2000  # characters that are searched for: a policy writes queries, and encoders read about 512 tokens


class RetrieverError(RuntimeError):
    """A retriever that could not answer. The query is not at fault, so envs do not catch it: it is a retried env error."""


@dataclass(frozen=True)
class Passage:
    """A piece of a corpus, with or without an image: ``Passage("12", "Paris", "Paris is the capital of France.")``."""

    id: str
    title: str
    text: str
    image: ImageSource = None


@dataclass(frozen=True)
class Hit:
    """A passage that was found. Higher scores are better; they are comparable within one query only."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Searches a corpus of ``passages`` passages (``None``: unknown). Thread-safe; equal queries get equal results."""

    name: str
    passages: int | None

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most ``topk`` hits, best first; fewer or none if few passages match.

        Only the first LONGEST_QUERY characters of a query are searched. Raises RetrieverError if there is no answer.
        """


class EmptyRetriever:
    """Finds nothing: the control that shows how well an agent does without retrieval."""

    name = "nothing"
    passages: int | None = 0

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [[] for _ in queries]


_Request = tuple[list[str], int, "Future[list[list[Hit]]]"]


class BatchingRetriever:
    """Makes ``retriever`` thread-safe: one caller at a time passes it all queries that are waiting, up to about ``max_batch`` at once.

    A neural encoder needs little more time for 64 queries than for one. A caller with more queries waits in the queue again after each
    ``max_batch`` of them, so that others need not wait for all.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 64) -> None:
        self.name, self.passages = retriever.name, retriever.passages
        self._retriever = retriever
        self._max_batch = max_batch
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        starts = range(0, len(queries), self._max_batch)
        return [hits for start in starts for hits in self._search(list(queries[start : start + self._max_batch]), topk)]

    def _search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        result: Future[list[list[Hit]]] = Future()
        self._requests.put((queries, topk, result))
        while not result.done():
            if self._turn.acquire(timeout=TURN_SECONDS):  # another caller's turn may answer this one, too
                try:
                    if not result.done():
                        self._serve()
                finally:
                    self._turn.release()
        return result.result()

    def _serve(self) -> None:
        """Answer requests in the order in which they came. There is one at least: the caller's own."""
        batch = [self._requests.get_nowait()]
        while sum(len(queries) for queries, _, _ in batch) < self._max_batch and not self._requests.empty():
            batch.append(self._requests.get())
        # One request for many hits does not make all of them find as many.
        for topk in sorted({topk for _, topk, _ in batch}):
            self._answer([request for request in batch if request[1] == topk], topk)

    def _answer(self, batch: list[_Request], topk: int) -> None:
        try:
            found = iter(self._retriever.search([query for queries, _, _ in batch for query in queries], topk))
            for queries, _, result in batch:
                result.set_result([next(found) for _ in queries])
        except BaseException as error:  # every caller that has no answer gets it
            for _, _, result in batch:
                if not result.done():
                    result.set_exception(error)


def index_folder(kind: str, made_from: object, build: Callable[[Path], None]) -> Path:
    """The cached folder of an index, which ``build(folder)`` fills if it is missing. Its name is a hash of ``repr(made_from)``."""
    digest = hashlib.blake2b(repr(made_from).encode(), digest_size=8).hexdigest()
    return build_folder(cache_root() / "retrieval" / f"{kind}-{digest}", build)
