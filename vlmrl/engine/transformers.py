"""The embedded engine: samples from a :class:`Policy` in this process, in batches that requests join as they come.

One daemon thread owns the model while it generates, and lets go of it between two tokens where it is paused. What was computed
is kept where it can be used again: a picture's features as long as the weights stay, a trajectory's keys and values from turn to
turn, and equal prompts are run once. After a weight update the rows in generation are computed anew from the tokens they have.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.features import PictureFeatures
from vlmrl.engine.kv_cache import BatchCache
from vlmrl.engine.sampling import Draws, sample, temperatures
from vlmrl.model.families import merged_grid, rope_positions
from vlmrl.model.policy import Policy
from vlmrl.model.routing import routes_of
from vlmrl.renderer import Renderer, expand
from vlmrl.types import Completion, MediaItem, Route

LINGER = 0.004  # an idle engine starts when nothing has come for so many seconds
LONGEST_LINGER = 0.05
JOIN_EVERY = 16  # tokens after which waiting requests join at the latest


@dataclass
class _Kept:
    """A trajectory between turns: its tokens and pictures so far, row ``index`` of ``cache``, and the next position."""

    token_ids: list[int]
    media_ids: list[str]
    cache: BatchCache
    index: int
    next_position: int
    routes: list[Route | None]

    def begins(self, row: _Row) -> bool:
        """Whether ``row`` goes on from here, with at least one new token to run."""
        length, pictures = len(self.token_ids), [item.id for item in row.request.media[: len(self.media_ids)]]
        return length < len(row.prompt_ids) and row.prompt_ids[:length] == self.token_ids and pictures == self.media_ids


@dataclass(eq=False)
class _Row:
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
    routes: list[Route | None] = field(default_factory=list)
    stop_reason: str | None = None
    abandoned: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids


class _Pause:
    """Somebody else has the model from when the engine's thread says that it ``stands`` until it is ``over``."""

    def __init__(self) -> None:
        self.stands: Future[None] = Future()
        self.stands.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.over = threading.Event()


class TransformersEngine:
    """Serves requests from ``policy``. ``keep_kv`` keeps keys and values between the turns of a trajectory, where layers have no more
    to remember than those: a recurrent state would also take in the padding that later turns bring.

    ``prefill_tokens`` bounds the padded tokens of one prompt forward, and the visual tokens that are encoded at once.
    ``images_encoded``, ``tokens_prefilled`` and ``seconds_busy`` count work done. With ``record_routes`` a reply tells its tokens'
    experts, if the model has any.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        *,
        keep_kv: bool = True,
        prefill_tokens: int = 16384,
        record_routes: bool = False,
    ) -> None:
        self.policy = policy
        self.policy_version = 0
        self.tokens_prefilled = 0
        self.seconds_busy = 0.0
        self._renderer = renderer
        self._keep_kv = keep_kv and not policy.family.recurrent
        self._prefill_tokens = prefill_tokens
        self._routing = policy.routing if record_routes else None
        self._inbox: queue.SimpleQueue[list[_Row]] = queue.SimpleQueue()
        self._features = PictureFeatures(policy, prefill_tokens)
        self._kept: dict[str, _Kept] = {}
        self._pause: _Pause | None = None
        self._lock = threading.Lock()  # between the engine's thread and release or a weight update
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="vlmrl-engine", daemon=True)
        self._thread.start()

    @property
    def images_encoded(self) -> int:
        return self._features.encoded

    async def generate(self, request: Request) -> Completion:
        return (await self.generate_wave([request]))[0]

    async def generate_wave(self, requests: Sequence[Request]) -> list[Completion]:
        """All of ``requests`` as one batch that nothing else joins before it has begun."""
        if self._closed:
            raise EngineError("the embedded engine is closed.")
        rows = [self._row(request) for request in requests]
        self._inbox.put(rows)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(row.future) for row in rows)))
        except asyncio.CancelledError:
            for row in rows:
                row.abandoned = True
            raise

    def release(self, trajectory_id: str) -> None:
        with self._lock:
            self._kept.pop(trajectory_id, None)

    async def pause(self) -> None:
        if self._pause is None and not self._closed:
            self._pause = _Pause()
            self._inbox.put([])  # wakes an idle thread
        if self._pause is not None:
            await asyncio.wrap_future(self._pause.stands)

    async def resume(self) -> None:
        self._end_pause()

    def weights_changed(self, policy_version: int) -> None:
        """The policy's weights are new: forget all that the old ones computed. Change them only while nothing is sampled."""
        with self._lock:
            self.policy_version = policy_version
            self._features.forget()
            self._kept.clear()

    def close(self) -> None:
        """End the engine's thread, which would abort the process if it ran torch while the interpreter shuts down.

        Who still waits gets an EngineError.
        """
        self._closed = True
        self._inbox.put([])  # wakes an idle thread
        self._end_pause()
        self._thread.join(timeout=10)

    def _row(self, request: Request) -> _Row:
        """Refuses, before anything runs, a request whose placeholders and pictures do not match."""
        marks = request.prompt_ids.count(self.policy.image_token_id) if self.policy.image_token_id is not None else 0
        if marks != len(request.media):
            raise ValueError(
                f"trajectory {request.trajectory_id}: the prompt has {marks} picture placeholders, but "
                f"{len(request.media)} pictures came with it."
            )
        prompt = expand(request.prompt_ids, self.policy.image_token_id, request.media)
        return _Row(request, Future(), prompt, Draws(request.sampling.seed))

    def _serve(self) -> None:
        running = _Batch(self)
        while True:
            arrived = self._receive(block=not running.rows)
            self._stand_still()
            if self._closed:
                _fail({*arrived, *running.rows}, "the embedded engine was closed.")
                return
            began = time.perf_counter()
            try:
                with torch.inference_mode():
                    if running.version != self.policy_version:
                        running.start_over()
                    if arrived:
                        running.admit(arrived)
                    for _ in range(JOIN_EVERY):
                        if not running.rows or self._is_wanted(len(running.rows)):
                            break
                        running.advance()
            except Exception as error:
                _fail({*arrived, *running.rows}, f"the embedded engine failed: {type(error).__name__}: {error}")
                running = _Batch(self)
            self.seconds_busy += time.perf_counter() - began

    def _stand_still(self) -> None:
        pause = self._pause
        if pause is not None:
            pause.stands.set_result(None)
            pause.over.wait()

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.over.set()

    def _is_wanted(self, running: int) -> bool:
        """Whether the thread has something else to do than the next token of ``running`` rows."""
        return self._closed or self._pause is not None or self._inbox.qsize() * 4 > running

    def _receive(self, block: bool) -> list[_Row]:
        """Everything that waits. An idle engine lingers while requests keep coming: what starts together stays together."""
        arrived: list[_Row] = []
        if block:
            arrived += self._inbox.get()
            began = time.perf_counter()
            lingers = len(arrived) == 1  # a wave is whole, and an empty list is a call to close
            while lingers and self._pause is None and time.perf_counter() - began < LONGEST_LINGER:
                try:
                    arrived += self._inbox.get(timeout=LINGER)
                except queue.Empty:
                    break
        while not self._inbox.empty():
            arrived += self._inbox.get()
        return [row for row in arrived if row.future.set_running_or_notify_cancel()]

    def _resume(self, row: _Row) -> _Kept | None:
        with self._lock:
            kept = self._kept.pop(row.request.trajectory_id, None)
        return kept if kept is not None and kept.begins(row) else None

    def _keep(self, row: _Row, cache: BatchCache, index: int, version: int) -> None:
        cached = row.prompt_ids + row.token_ids[:-1]  # the last token was never fed
        pictures = [item.id for item in row.request.media]
        with self._lock:
            if version == self.policy_version:
                self._kept[row.request.trajectory_id] = _Kept(
                    cached, pictures, cache, index, row.next_position, row.routes
                )

    def _grid(self, item: MediaItem) -> tuple[int, int]:
        return merged_grid(item.mm_inputs["image_grid_thw"], self.policy.merge_size)


class _Batch:
    """The rows in generation, and their cache."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.policy = engine.policy
        self.version = engine.policy_version
        self.rows: list[_Row] = []
        self.cache: BatchCache | None = None

    def start_over(self) -> None:
        """The weights are new: compute anew what the rows have so far, and go on from there."""
        rows, self.rows, self.cache = self.rows, [], None
        self.version = self.engine.policy_version
        self.admit([row for row in rows if not row.abandoned])

    def admit(self, arrived: list[_Row]) -> None:
        """Run the rows' prompts and what they have sampled, draw the next tokens, and let them join. What is equal is run once."""
        fresh: dict[tuple[object, ...], list[_Row]] = {}
        resumed: list[tuple[_Row, _Kept]] = []
        for row in arrived:
            kept = self.engine._resume(row)
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
            if not parts or (len(parts[-1]) + 1) * longest > self.engine._prefill_tokens:
                parts.append([])
                longest = length(item)
            parts[-1].append(item)
        return parts

    def _prefill(self, prompts: list[list[_Row]], kept: Sequence[_Kept | None]) -> None:
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
            grids = [self.engine._grid(item) for item in row.request.media[seen[index] :]]
            start = 0 if k is None else k.next_position
            place, following = rope_positions(ids, grids, self.policy.image_token_id, start)
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
        features = self.engine._features.of(shown)
        images = [features[item.id] for item in shown]
        hidden, routes = self._run(tokens, positions, mask, images, cache.hf, real=real)
        for rows, n, ids, new in zip(prompts, done, new_ids, routes, strict=True):
            for row in rows:  # what was run before keeps the experts it had
                row.routes += new[length - len(ids) :][len(row.routes) - n :]
        self.engine.tokens_prefilled += sum(map(len, new_ids))
        owner = [index for index, rows in enumerate(prompts) for _ in rows]
        members = [row for rows in prompts for row in rows]
        self._draw(members, hidden[torch.tensor(owner, device=device), -1])
        joined = cache.taken(owner)
        self.cache = (
            joined if self.cache is None else BatchCache.join([self.cache.taken(range(len(self.rows))), joined])
        )
        self.rows += members
        self._retire()

    def _run(self, tokens: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, list[list[Route]]]:
        """Hidden states, and for each row the experts of its tokens, where they are recorded."""
        routing = self.engine._routing
        if routing is None:
            return self.policy.hidden(tokens, *args, **options), [[] for _ in tokens]
        with routing.recorded() as chosen:
            hidden = self.policy.hidden(tokens, *args, **options)
        return hidden, [routes_of(row) for row in torch.stack(chosen, 1).unflatten(0, tokens.shape)]

    def _draw(self, rows: list[_Row], hidden: torch.Tensor) -> None:
        params = [row.request.sampling for row in rows]
        logits = self.policy.logits(hidden, temperatures(params, hidden.device))
        ids, logprobs = sample(logits, params, [row.draws[len(row.token_ids)] for row in rows])
        for row, token, logprob in zip(rows, ids, logprobs, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
            row.stop_reason = self._stop_reason(row)

    def _stop_reason(self, row: _Row) -> str | None:
        if row.token_ids[-1] in self.engine._renderer.stop_ids:
            return "stop"
        stops = row.request.sampling.stop
        if stops:
            longest = max(len(stop.encode()) for stop in stops)  # a token is one byte at least
            tail = self.engine._renderer.decode(row.token_ids[-longest - 4 :])
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
        if self.engine._keep_kv:
            stopped = [index for index in leaving if rows[index].stop_reason == "stop"]
            own = cache.taken(stopped) if going and stopped else cache  # not the whole batch for the sake of a few
            for place, index in enumerate(stopped):
                self.engine._keep(rows[index], own, place if going else index, self.version)
        for index in leaving:
            _answer(rows[index])
        self.rows = [rows[index] for index in going]
        self.cache = cache.taken(going) if going else None


def _answer(row: _Row) -> None:
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


def _fail(rows: Collection[_Row], reason: str) -> None:
    for row in rows:
        if not row.future.done():
            row.future.set_exception(EngineError(reason))
