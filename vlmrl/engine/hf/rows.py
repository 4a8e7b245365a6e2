"""The rows of the embedded engine: requests in progress, and what is kept of a trajectory between two turns."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.hf.kv_cache import BatchCache, nbytes
from vlmrl.engine.hf.prompts import CachedPrompts
from vlmrl.engine.hf.sampling import RandomNumbers
from vlmrl.types import Completion, ExpertRouting


@dataclass
class KeptRow:
    """One trajectory's keys and values between turns: row ``index`` of ``cache``, for these tokens and images."""

    token_ids: list[int]
    media_ids: list[str]
    cache: BatchCache
    index: int
    next_position: int
    expert_routing: list[ExpertRouting | None]

    def is_prefix_of(self, row: RequestRow) -> bool:
        """Whether ``row``'s prompt continues this one with at least one new token."""
        length, images = len(self.token_ids), [item.id for item in row.request.media[: len(self.media_ids)]]
        return length < len(row.prompt_ids) and row.prompt_ids[:length] == self.token_ids and images == self.media_ids


@dataclass(eq=False)
class RequestRow:
    """One request in progress.

    ``versions`` are the policy versions that sampled ``token_ids``; ``expert_routing`` is of all tokens run so far.
    """

    request: Request
    future: Future[Completion]
    prompt_ids: list[int]
    draws: RandomNumbers
    next_position: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    expert_routing: list[ExpertRouting | None] = field(default_factory=list)
    stop_reason: str | None = None
    abandoned: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.sampling.max_tokens - len(self.token_ids)


class KeptRows:
    """Keys and values of trajectories between two turns, computed with the weights of ``policy_version``. Thread-safe.

    Nothing is kept unless ``enabled``. The least recently used are the first ones.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.policy_version = 0
        self.enabled = enabled
        self._rows: dict[str, KeptRow] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, row: RequestRow) -> KeptRow | None:
        """Remove and return the cached prefix of ``row``'s prompt; ``None`` if there is none."""
        with self._lock:
            prefix = self._rows.pop(row.request.trajectory_id, None)
        return prefix if prefix is not None and prefix.is_prefix_of(row) else None

    def of(self, row: RequestRow) -> KeptRow | None:
        """What is kept of ``row``'s trajectory."""
        return self._rows.get(row.request.trajectory_id)

    def drop_stale(self, row: RequestRow) -> None:
        """Drop what is kept of ``row``'s trajectory, unless its prompt continues it."""
        prefix = self.of(row)
        if prefix is not None and not prefix.is_prefix_of(row):
            self.release(row.request.trajectory_id)

    def put(self, row: RequestRow, cache: BatchCache, index: int, version: int) -> None:
        """Keep row ``index`` of ``cache``, unless it was computed with older weights, or its request was cancelled.

        A request is marked as abandoned before its trajectory is released, so nothing is kept after the release.
        """
        cached = row.prompt_ids + row.token_ids[:-1]  # the last token was sampled, but not run
        images = [item.id for item in row.request.media]
        with self._lock:
            if version == self.policy_version and not row.abandoned:
                prefix = KeptRow(cached, images, cache, index, row.next_position, row.expert_routing)
                self._rows.pop(row.request.trajectory_id, None)
                self._rows[row.request.trajectory_id] = prefix

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._rows

    @property
    def nbytes(self) -> int:
        """Memory of all prefixes. Rows that were kept at the same time have one cache, which lives as long as any of them."""
        with self._lock:
            return nbytes(prefix.cache for prefix in self._rows.values())

    @property
    def prompts(self) -> list[CachedPrompts]:
        """Those that the kept rows begin with."""
        with self._lock:
            caches = {id(prefix.cache): prefix.cache for prefix in self._rows.values()}
        return [cache.prefixes for cache in caches.values() if cache.prefixes is not None]

    def evict(self, spared: Collection[str] = ()) -> bool:
        """Drop the least recently used prefix of a trajectory that is not ``spared``. False: there is none."""
        with self._lock:
            oldest = next((name for name in self._rows if name not in spared), None)
            if oldest is not None:
                del self._rows[oldest]
            return oldest is not None

    def release(self, trajectory_id: str) -> None:
        with self._lock:
            self._rows.pop(trajectory_id, None)

    def clear(self, policy_version: int) -> None:
        """Drop everything after a weight update to ``policy_version``."""
        with self._lock:
            self.policy_version = policy_version
            self._rows.clear()


@dataclass(eq=False, repr=False)
class BatchState:
    """The rows in progress and their KV cache."""

    rows: list[RequestRow] = field(default_factory=list)
    cache: BatchCache | None = None


def complete(row: RequestRow) -> None:
    """Resolve the row's future with the tokens so far."""
    if not row.future.done():
        reason = row.stop_reason or "abort"
        routing = [*row.expert_routing, None] if row.expert_routing else []
        row.future.set_result(
            Completion(row.token_ids, row.logprobs, reason, row.versions, len(row.prompt_ids), routing)  # type: ignore[arg-type]
        )


def fail(rows: Iterable[RequestRow], reason: str) -> None:
    for row in rows:
        if not row.future.done():
            row.future.set_exception(EngineError(reason))
