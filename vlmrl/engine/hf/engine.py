"""The embedded engine: samples from a :class:`Policy` in this process, with continuous batching.

One daemon thread runs the model; a pause stops it between two tokens. Work is reused where possible: an image's features until the
next weight update, a trajectory's keys and values from turn to turn, and one prefill for equal prompts. After a weight update the
running rows are prefilled again from the tokens they have.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from vlmrl.engine.base import EngineError, Request, check_placeholders
from vlmrl.engine.hf.batch import Resources, RunningBatch
from vlmrl.engine.hf.budget import PREFILL_TOKENS, Budget
from vlmrl.engine.hf.cpu_threads import CpuThreads
from vlmrl.engine.hf.features import ImageFeatureCache
from vlmrl.engine.hf.rows import KeptRows, RequestRow, complete, fail
from vlmrl.engine.hf.sampling import RandomNumbers
from vlmrl.model.policy import Policy
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion
from vlmrl.utils.current_gpu import current_gpu
from vlmrl.utils.part_seconds import PartSeconds
from vlmrl.utils.threads import busy

BATCH_WINDOW = 0.004  # seconds without a new request after which an idle engine starts its batch
LONGEST_BATCH_WINDOW = 0.05  # seconds after its first request at which it starts in any case
JOIN_EVERY = 16  # tokens after which waiting requests join at the latest


class _Pause:
    """``begun`` resolves once the engine's thread has stopped using the model; the thread waits until ``over`` is set."""

    def __init__(self) -> None:
        self.begun: Future[None] = Future()
        self.begun.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.over = threading.Event()


class HFEngine:
    """Samples from ``policy``.

    ``keep_kv`` keeps keys and values, and a recurrent model's states, between a trajectory's turns. ``prefill_tokens`` bounds the
    padded tokens of one prefill forward, and the visual tokens encoded at once. ``record_expert_routing`` adds their tokens'
    experts to completions, if the model has any. ``images_encoded``, ``tokens_prefilled`` and ``seconds_busy`` count work done.
    ``kv_cache_bytes`` limits the KV cache, prefixes between turns included: requests that do not fit wait
    (:mod:`vlmrl.engine.hf.budget`). ``threads`` are those of a CPU; by default the engine times one and all in its first forwards, and
    after the first weight update, and takes what is faster, which changes results by rounding (:mod:`vlmrl.engine.hf.cpu_threads`).
    """

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        *,
        keep_kv: bool = True,
        prefill_tokens: int = PREFILL_TOKENS,
        record_expert_routing: bool = False,
        kv_cache_bytes: float | None = None,
        threads: int | None = None,
    ) -> None:
        self.policy = policy
        self.seconds_busy = 0.0
        self._seconds = PartSeconds()
        self._inbox: queue.SimpleQueue[list[RequestRow]] = queue.SimpleQueue()
        prefixes = KeptRows(enabled=keep_kv)
        self._resources = Resources(
            policy,
            renderer,
            ImageFeatureCache(policy, prefill_tokens),
            prefixes,
            policy.routing if record_expert_routing else None,
            prefill_tokens,
            Budget(policy, prefixes, prefill_tokens, kv_cache_bytes),
            CpuThreads(threads) if policy.device.type == "cpu" else None,
        )
        self._running = RunningBatch(self._resources)
        self._waiting: deque[RequestRow] = deque()
        self._pause: _Pause | None = None
        self._closed = False
        serve = (weakref.ref(self), self._inbox)
        self._thread = threading.Thread(target=_serve, args=serve, name="vlmrl-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._inbox.put, []).atexit = False  # ends the thread of an engine that nobody closed

    @property
    def images_encoded(self) -> int:
        return self._resources.features.encoded

    @property
    def tokens_prefilled(self) -> int:
        return self._resources.tokens_prefilled

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part. On a GPU the host does not wait for the vision encoder: most of its time is in ``prefill``."""
        return dict(self._seconds.total)

    @property
    def policy_version(self) -> int:
        return self._resources.prefixes.policy_version

    async def generate(self, request: Request) -> Completion:
        [result] = await self.generate_batch([request])
        if isinstance(result, BaseException):
            raise result
        return result

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion | BaseException]:
        """Serve ``requests`` as one batch, which other requests can join only once it has started. Of one that fails, the error."""
        if self._closed:
            raise EngineError("the embedded engine is closed.")
        rows = [self._row(request) for request in requests]
        self._inbox.put(rows)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(row.future) for row in rows), return_exceptions=True)
        except asyncio.CancelledError:
            for row in rows:
                row.abandoned = True
            raise

    def release(self, trajectory_id: str) -> None:
        self._resources.prefixes.release(trajectory_id)

    async def pause(self) -> None:
        """Stop between two tokens, and drop image features: the trainer needs their memory, and new weights would drop them anyway."""
        if self._pause is None and not self._closed:
            self._pause = _Pause()
            self._inbox.put([])  # wakes an idle thread
        if self._pause is not None:
            await asyncio.wrap_future(self._pause.begun)
        self._resources.features.clear()

    async def resume(self) -> None:
        self._end_pause()

    def weights_changed(self, policy_version: int) -> None:
        """Drop everything that the old weights computed. Change the policy's weights only while the engine is paused or idle."""
        self._resources.features.clear()
        self._resources.prefixes.clear(policy_version)
        if self._resources.threads is not None:
            self._resources.threads.weights_changed()

    def close(self) -> None:
        """End the engine's thread. Waiting requests fail with an EngineError."""
        self._closed = True
        self._inbox.put([])  # wakes an idle thread
        self._end_pause()
        self._thread.join(timeout=10)

    def _row(self, request: Request) -> RequestRow:
        check_placeholders(request, self.policy.image_token_id)
        prompt = expand(request.prompt_ids, self.policy.image_token_id, request.media)
        return RequestRow(request, Future(), prompt, RandomNumbers(request.sampling.seed))

    def _work(self, arrived: list[RequestRow]) -> bool:
        """Serve the requests that ``arrived`` and all that come meanwhile. Returns whether the engine is still open."""
        self._wait_for_more(arrived)
        while True:
            self._waiting += self._receive(arrived)
            self._wait_out_pause()
            if self._closed:
                fail([*self._waiting, *self._running.rows], "the embedded engine was closed.")
                self._running = RunningBatch(self._resources)
                return False
            if not self._running.rows and not self._waiting:
                self._resources.budget.most_rows = None
                return True
            began = time.perf_counter()
            self._sample()
            self.seconds_busy += time.perf_counter() - began

    def _sample(self) -> None:
        """Advance the batch, or begin a new one if that fails. A method of its own: the frame of an idle engine holds no rows."""
        before, admitted = list(self._running.rows), list[RequestRow]()
        failure: BaseException | None = None
        try:
            with busy(), current_gpu(self.policy.device), torch.inference_mode():
                self._advance(self._running, admitted)
        except BaseException as error:  # without its thread, the engine would never answer
            failure = error.with_traceback(None)  # its frames hold tensors
        if failure is None:
            return
        rows = list(dict.fromkeys([*before, *admitted]))
        self._running = RunningBatch(self._resources)
        if rows:
            self._recover(rows, failure)
        else:  # the budget itself failed: requests that stay would be tried for ever
            fail(self._waiting, f"the embedded engine failed: {type(failure).__name__}: {failure}")
            self._waiting.clear()

    def _advance(self, running: RunningBatch, admitted: list[RequestRow]) -> None:
        """Let waiting rows join, and decode some tokens. Adds the rows that join to ``admitted``."""
        if running.version != self.policy_version:
            with self._prefilling():
                running.recompute()
        admitted += self._resources.budget.admit(self._waiting, running)
        if admitted:
            with self._prefilling():
                running.admit([row for row in admitted if not row.abandoned])
            for row in admitted:
                if row.abandoned:
                    complete(row)
        for _ in range(JOIN_EVERY):
            rows = len(running.rows)
            if not rows or self._must_return(rows):
                break
            with self._seconds.of("decode"):
                running.advance()
            if self._waiting and len(running.rows) < rows:
                break  # there may be room for more

    @contextmanager
    def _prefilling(self) -> Iterator[None]:
        """Times a prefill, and within it the vision encoder, which is a part of its own."""
        features, began = self._resources.features, time.perf_counter()
        encoding = features.seconds
        try:
            yield
        finally:
            vision = features.seconds - encoding
            self._seconds.add("vision", vision)
            self._seconds.add("prefill", time.perf_counter() - began - vision)

    def _recover(self, rows: list[RequestRow], failure: BaseException) -> None:
        """Fail the ``rows`` of a batch that failed. If its memory did not suffice, they are sampled on in smaller batches instead.

        A single row that does not fit fails alone.
        """
        for row in rows:
            if row.stop_reason is not None or row.abandoned:
                complete(row)
        left, hint = [row for row in rows if not row.future.done()], ""
        if isinstance(failure, torch.OutOfMemoryError):
            resources = self._resources
            resources.features.clear()
            resources.prefixes.clear(self.policy_version)
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            if len(left) > 1:
                resources.budget.most_rows = len(left) // 2
                self._waiting.extendleft(reversed(left))
                return
            hint = " Set rollout.kv_cache_gib to less than the engine has, or lower rollout.max_tokens."
        fail(left, f"the embedded engine failed: {type(failure).__name__}: {failure}{hint}")

    def _wait_out_pause(self) -> None:
        pause = self._pause
        if pause is not None:
            pause.begun.set_result(None)
            pause.over.wait()

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.over.set()

    def _must_return(self, running: int) -> bool:
        """Whether to stop decoding the ``running`` rows for now: to close, to pause, or to admit waiting requests."""
        return self._closed or self._pause is not None or self._inbox.qsize() * 4 > running

    def _wait_for_more(self, arrived: list[RequestRow]) -> None:
        """Wait a little for others after a single request, since requests that start together stay in one batch."""
        began = time.perf_counter()
        waits = len(arrived) == 1  # a batch is complete, and an empty list only wakes the thread
        while waits and self._pause is None and time.perf_counter() - began < LONGEST_BATCH_WINDOW:
            try:
                arrived += self._inbox.get(timeout=BATCH_WINDOW)
            except queue.Empty:
                break

    def _receive(self, arrived: list[RequestRow]) -> list[RequestRow]:
        """The requests that ``arrived``, which is cleared, and those that wait in the inbox, without cancelled ones."""
        while not self._inbox.empty():
            arrived += self._inbox.get()
        rows = [row for row in arrived if row.future.set_running_or_notify_cancel()]
        arrived.clear()
        return rows


def _serve(reference: weakref.ref[HFEngine], inbox: queue.SimpleQueue[list[RequestRow]]) -> None:
    """An engine's thread. While it waits for requests it does not hold the engine, so that one that was dropped is freed."""
    while True:
        arrived = list(inbox.get())
        engine = reference()
        if engine is None or not engine._work(arrived):
            return
        del engine
