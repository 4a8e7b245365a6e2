"""The rows in generation: prompts run, tokens drawn, keys and values kept, by the thread of :mod:`vlmrl.engine.hf.engine`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from vlmrl.engine.base import Request
from vlmrl.engine.hf.features import ImageFeatureCache
from vlmrl.engine.hf.kv_cache import BatchCache
from vlmrl.engine.hf.sampling import Draws, sample, temperatures
from vlmrl.model.expert_routing import ExpertRouters, routing_from_indices
from vlmrl.model.policy import Policy
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion, ExpertRouting


@dataclass
class _Kept:
    """A trajectory between turns: its tokens and images so far, row ``index`` of ``cache``, and the next position."""

    token_ids: list[int]
    media_ids: list[str]
    cache: BatchCache
    index: int
    next_position: int
    routes: list[ExpertRouting | None]

    def begins(self, row: Row) -> bool:
        """Whether ``row`` goes on from here, with at least one new token to run."""
        length, images = len(self.token_ids), [item.id for item in row.request.media[: len(self.media_ids)]]
        return length < len(row.prompt_ids) and row.prompt_ids[:length] == self.token_ids and images == self.media_ids


@dataclass(eq=False)
class Row:
    """One request while it is served.

    ``versions`` say under which weights each of its ``token_ids`` was drawn, ``routes`` which experts those tokens had that were run.
    """

    request: Request
    future: Future[Completion]
    prompt_ids: list[int]
    draws: Draws
    next_position: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[ExpertRouting | None] = field(default_factory=list)
    stop_reason: str | None = None
    abandoned: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids


class PrefixCache:
    """Keys and values of trajectories between two turns, all of the weights ``policy_version``; used from several threads.

    With ``off`` nothing is kept.
    """

    def __init__(self, *, off: bool) -> None:
        self.policy_version = 0
        self.off = off
        self._rows: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, row: Row) -> _Kept | None:
        """What ``row`` goes on from, if it does."""
        with self._lock:
            kept = self._rows.pop(row.request.trajectory_id, None)
        return kept if kept is not None and kept.begins(row) else None

    def put(self, row: Row, cache: BatchCache, index: int, version: int) -> None:
        """Row ``index`` of ``cache``, unless the weights that made it are old."""
        cached = row.prompt_ids + row.token_ids[:-1]  # the last token was never fed
        images = [item.id for item in row.request.media]
        with self._lock:
            if version == self.policy_version:
                kept = _Kept(cached, images, cache, index, row.next_position, row.routes)
                self._rows[row.request.trajectory_id] = kept

    def release(self, trajectory_id: str) -> None:
        with self._lock:
            self._rows.pop(trajectory_id, None)

    def forget(self, policy_version: int) -> None:
        """The weights are new."""
        with self._lock:
            self.policy_version = policy_version
            self._rows.clear()


@dataclass
class Resources:
    """What every batch of an engine works with. ``prefill_tokens`` bounds one prompt forward, ``routing`` records experts."""

    policy: Policy
    renderer: Renderer
    features: ImageFeatureCache
    kept: PrefixCache
    routing: ExpertRouters | None
    prefill_tokens: int
    tokens_prefilled: int = 0


class RunningBatch:
    """The rows in generation, and their cache."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self.policy = resources.policy
        self.version = resources.kept.policy_version
        self.rows: list[Row] = []
        self.cache: BatchCache | None = None

    def start_over(self) -> None:
        """The weights are new: compute anew what the rows have so far, and go on from there."""
        rows, self.rows, self.cache = self.rows, [], None
        self.version = self.resources.kept.policy_version
        self.admit([row for row in rows if not row.abandoned])

    def admit(self, arrived: list[Row]) -> None:
        """Run the rows' prompts and what they have sampled, draw the next tokens, and let them join. What is equal is run once."""
        fresh: dict[tuple[object, ...], list[Row]] = {}
        resumed: list[tuple[Row, _Kept]] = []
        for row in arrived:
            kept = self.resources.kept.take(row)
            if kept is not None:
                resumed.append((row, kept))
            else:
                key = (tuple(row.request.prompt_ids), *row.token_ids, tuple(item.id for item in row.request.media))
                fresh.setdefault(key, []).append(row)
        for part in self._chunks(list(fresh.values()), lambda rows: len(rows[0].ids)):
            self._prefill(part, [None] * len(part))
        for pairs in self._chunks(resumed, lambda pair: len(pair[0].prompt_ids)):
            pairs.sort(key=lambda pair: (id(pair[1].cache), pair[1].index))  # as they lie in their caches
            self._prefill([[row] for row, _ in pairs], [kept for _, kept in pairs])

    def advance(self) -> None:
        """One more token for every row."""
        cache, rows = self.cache, self.rows
        assert cache is not None
        device = self.policy.device
        cache.extend(torch.ones(len(rows), 1, dtype=torch.bool, device=device))
        tokens = torch.tensor([[row.token_ids[-1]] for row in rows], device=device)
        positions = torch.tensor([[row.next_position] for row in rows], device=device).expand(3, -1, -1)
        hidden, routes = self._run(tokens, positions, cache.valid[:, None, None, :], cache=cache.hf)
        for row, new in zip(rows, routes, strict=True):
            row.next_position += 1
            row.routes += new
        self._draw(rows, hidden[:, -1])
        self._retire()

    def _chunks(self, items: list, length) -> list[list]:  # type: ignore[type-arg, no-untyped-def]
        """Items of like length together, as many as fit into one forward."""
        parts: list[list] = []  # type: ignore[type-arg]
        longest = 0
        for item in sorted(items, key=length):
            longest = max(longest, length(item))
            if not parts or (len(parts[-1]) + 1) * longest > self.resources.prefill_tokens:
                parts.append([])
                longest = length(item)
            parts[-1].append(item)
        return parts

    def _prefill(self, prompts: list[list[Row]], kept: Sequence[_Kept | None]) -> None:
        """Run one forward over distinct prompts, each shared by the rows of its list, after what is ``kept`` of them."""
        device = self.policy.device
        heads = [rows[0] for rows in prompts]
        done = [0 if k is None else len(k.token_ids) for k in kept]
        seen = [0 if k is None else len(k.media_ids) for k in kept]
        new_ids = [row.ids[n:] for row, n in zip(heads, done, strict=True)]
        length = max(map(len, new_ids))
        tokens = torch.zeros(len(heads), length, dtype=torch.long)
        positions = torch.zeros(3, len(heads), length, dtype=torch.long)
        real = torch.zeros(len(heads), length, dtype=torch.bool)
        for index, (row, ids, k) in enumerate(zip(heads, new_ids, kept, strict=True)):
            start = 0 if k is None else k.next_position
            place, following = self.policy.family.positions(ids, row.request.media[seen[index] :], start)
            tokens[index, length - len(ids) :] = torch.tensor(ids)
            positions[:, index, length - len(ids) :] = place
            real[index, length - len(ids) :] = True
            for member in prompts[index]:
                member.next_position = following
                member.routes = member.routes if k is None else list(k.routes)
        tokens, positions, real = tokens.to(device), positions.to(device), real.to(device)
        past = [k for k in kept if k is not None]
        cache = _resumed(past) if past else BatchCache.empty(self.policy.layer_kinds, len(heads), device)
        mask = cache.mask_for(real)
        cache.extend(real)
        shown = [item for row, n in zip(heads, seen, strict=True) for item in row.request.media[n:]]
        features = self.resources.features.of(shown)
        images = [features[item.id] for item in shown]
        hidden, routes = self._run(tokens, positions, mask, images, cache.hf, real=real)
        for rows, n, ids, new in zip(prompts, done, new_ids, routes, strict=True):
            for row in rows:  # what was run before keeps the experts it had
                row.routes += new[length - len(ids) :][len(row.routes) - n :]
        self.resources.tokens_prefilled += sum(map(len, new_ids))
        owner = [index for index, rows in enumerate(prompts) for _ in rows]
        members = [row for rows in prompts for row in rows]
        self._draw(members, hidden[torch.tensor(owner, device=device), -1])
        joined = cache.taken(owner)
        self.cache = (
            joined if self.cache is None else BatchCache.join([self.cache.taken(range(len(self.rows))), joined])
        )
        self.rows += members
        self._retire()

    def _run(self, tokens: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, list[list[ExpertRouting]]]:
        """Hidden states, and for each row the experts of its tokens, where they are recorded."""
        routing = self.resources.routing
        if routing is None:
            return self.policy.hidden(tokens, *args, **options), [[] for _ in tokens]
        with routing.recorded() as chosen:
            hidden = self.policy.hidden(tokens, *args, **options)
        return hidden, [
            routing_from_indices(row) for row in torch.stack(chosen, 1).unflatten(0, tokens.shape).cpu().numpy()
        ]

    def _draw(self, rows: list[Row], hidden: torch.Tensor) -> None:
        params = [row.request.sampling for row in rows]
        logits = self.policy.logits(hidden, temperatures(params, hidden.device))
        ids, logprobs = sample(logits, params, [row.draws[len(row.token_ids)] for row in rows])
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            row.stop_reason = self._stop_reason(row)

    def _stop_reason(self, row: Row) -> str | None:
        if row.token_ids[-1] in self.resources.renderer.stop_ids:
            return "stop"
        stops = row.request.sampling.stop
        if stops:
            longest = max(len(stop.encode()) for stop in stops)  # a token is one byte at least
            tail = self.resources.renderer.decode(row.token_ids[-longest - 4 :])
            if any(stop in tail for stop in stops):
                return "stop"
        return "length" if len(row.token_ids) >= row.request.sampling.max_tokens else None

    def _retire(self) -> None:
        """Answer the finished rows, keep their keys and values, and go on with the rest."""
        going = [i for i, row in enumerate(self.rows) if row.stop_reason is None and not row.abandoned]
        if len(going) == len(self.rows):
            return
        cache, rows = self.cache, self.rows
        assert cache is not None
        leaving = sorted(set(range(len(rows))) - set(going))
        if not self.resources.kept.off:
            stopped = [index for index in leaving if rows[index].stop_reason == "stop"]
            own = cache.taken(stopped) if going and stopped else cache  # not the whole batch for the sake of a few
            for place, index in enumerate(stopped):
                self.resources.kept.put(rows[index], own, place if going else index, self.version)
        for index in leaving:
            _answer(rows[index])
        self.rows = [rows[index] for index in going]
        self.cache = cache.taken(going) if going else None


def _answer(row: Row) -> None:
    if not row.future.done():
        reason = row.stop_reason or "abort"
        routes = [*row.routes, None] if row.routes else []
        row.future.set_result(
            Completion(row.token_ids, row.logprobs, reason, row.versions, len(row.prompt_ids), routes)  # type: ignore[arg-type]
        )


def _resumed(kept: Sequence[_Kept]) -> BatchCache:
    """The rows of ``kept``, of which those of one cache stand together."""
    parts = groupby(kept, lambda k: id(k.cache))
    return BatchCache.join([rows[0].cache.taken([k.index for k in rows]) for rows in (list(part) for _, part in parts)])
