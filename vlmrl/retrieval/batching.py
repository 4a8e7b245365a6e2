"""Queries that threads ask one by one, answered together in one thread.

A neural encoder takes 64 in little more time than one, and threads that all compute would wait for the interpreter's lock by turns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from vlmrl.retrieval.base import Hit, Retriever

_Asked = tuple[list[str], int, "Future[list[list[Hit]]]"]


class Batched:
    """Hands ``retriever`` whatever has been asked by the time it is free, in its one thread, at most ``largest`` queries at once."""

    def __init__(self, retriever: Retriever, largest: int = 64) -> None:
        self.name, self.passages = retriever.name, retriever.passages
        self._retriever = retriever
        self._largest = largest
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="vlmrl-retriever", daemon=True).start()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        answer: Future[list[list[Hit]]] = Future()
        self._asked.put((list(queries), topk, answer))
        return answer.result()

    def _work(self) -> None:
        while True:
            batch = [self._asked.get()]
            while sum(len(queries) for queries, _, _ in batch) < self._largest and not self._asked.empty():
                batch.append(self._asked.get())
            try:
                found = iter(self._search_all(batch))
                for queries, topk, answer in batch:
                    answer.set_result([next(found)[:topk] for _ in queries])
            except BaseException as error:  # whatever went wrong belongs to those who asked
                for _, _, answer in batch:
                    answer.set_exception(error)

    def _search_all(self, batch: list[_Asked]) -> list[list[Hit]]:
        return self._retriever.search(
            [query for queries, _, _ in batch for query in queries], max(k for _, k, _ in batch)
        )
