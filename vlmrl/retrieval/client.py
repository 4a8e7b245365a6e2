"""A retriever that is a server: ours (`vlmrl retriever serve`), or any that speaks the same protocol (see `wire.py`)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from vlmrl.retrieval.base import Hit, RetrieverError
from vlmrl.retrieval.wire import read_result

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds


class HttpRetriever:
    """Asks ``url`` (``http://127.0.0.1:8000``, with ``/retrieve`` or without). ``timeout`` is a request's, in seconds.

    A server that is away, late or broken is asked again with growing pauses until ``patience`` seconds have passed; then it is a
    RetrieverError. A request that the server refuses (4xx) is one at once.
    """

    name = "http"
    passages: int | None = None

    def __init__(self, url: str, timeout: float = 10.0, patience: float = 30.0) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.patience = patience
        self._client = httpx.Client(timeout=timeout, limits=httpx.Limits(max_connections=None))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        asked = {"queries": list(queries), "topk": topk, "return_scores": True}
        deadline, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            try:
                return self._ask(asked)
            except _AwayError as error:
                if time.monotonic() + pause > deadline:
                    raise RetrieverError(f"retriever {self.url}: no answer in {self.patience:g} s: {error}") from error
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all at the same moment
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self, asked: dict[str, Any]) -> list[list[Hit]]:
        try:
            answer = self._client.post(self.url, json=asked)
        except httpx.TransportError as error:
            raise _AwayError(f"{type(error).__name__}: {error}") from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _AwayError(f"{answer.status_code} {answer.text:.200}")
        if answer.status_code != 200:
            raise RetrieverError(f"retriever {self.url} refuses: {answer.status_code} {answer.text:.300}")
        try:
            return read_result(answer.json()["result"], len(asked["queries"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RetrieverError(f"retriever {self.url} gave no reply of the protocol: {error!r}") from error


class _AwayError(Exception):
    """A failure that may pass."""
