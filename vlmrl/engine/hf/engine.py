"""The embedded engine: samples from a :class:`Policy` in this process, in batches that requests join as they come.

One daemon thread owns the model while it generates, and lets go of it between two tokens where it is paused. What was computed
is kept where it can be used again: an image's features as long as the weights stay, a trajectory's keys and values from turn to
turn, and equal prompts are run once. After a weight update the rows in generation are computed anew from the tokens they have.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import torch

from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.hf.batch import PrefixCache, Resources, Row, RunningBatch
from vlmrl.engine.hf.features import ImageFeatureCache
from vlmrl.engine.hf.sampling import Draws
from vlmrl.model.policy import Policy
from vlmrl.multimodal.renderer import Renderer, expand
from vlmrl.types import Completion

LINGER = 0.004  # an idle engine starts when nothing has come for so many seconds
LONGEST_LINGER = 0.05
JOIN_EVERY = 16  # tokens after which waiting requests join at the latest


class _Pause:
    """Somebody else has the model from when the engine's thread says that it ``stands`` until it is ``over``."""

    def __init__(self) -> None:
        self.stands: Future[None] = Future()
        self.stands.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.over = threading.Event()


class HFEngine:
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
        self.seconds_busy = 0.0
        self._inbox: queue.SimpleQueue[list[Row]] = queue.SimpleQueue()
        self._resources = Resources(
            policy,
            renderer,
            ImageFeatureCache(policy, prefill_tokens),
            PrefixCache(off=not keep_kv or policy.family.recurrent),
            policy.routing if record_routes else None,
            prefill_tokens,
        )
        self._pause: _Pause | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="vlmrl-engine", daemon=True)
        self._thread.start()

    @property
    def images_encoded(self) -> int:
        return self._resources.features.encoded

    @property
    def tokens_prefilled(self) -> int:
        return self._resources.tokens_prefilled

    @property
    def policy_version(self) -> int:
        return self._resources.kept.policy_version

    async def generate(self, request: Request) -> Completion:
        return (await self.generate_batch([request]))[0]

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
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
        self._resources.kept.release(trajectory_id)

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
        self._resources.features.forget()
        self._resources.kept.forget(policy_version)

    def close(self) -> None:
        """End the engine's thread, which would abort the process if it ran torch while the interpreter shuts down.

        Who still waits gets an EngineError.
        """
        self._closed = True
        self._inbox.put([])  # wakes an idle thread
        self._end_pause()
        self._thread.join(timeout=10)

    def _row(self, request: Request) -> Row:
        """Refuses, before anything runs, a request whose placeholders and images do not match."""
        marks = request.prompt_ids.count(self.policy.image_token_id) if self.policy.image_token_id is not None else 0
        if marks != len(request.media):
            raise ValueError(
                f"trajectory {request.trajectory_id}: the prompt has {marks} image placeholders, but "
                f"{len(request.media)} images came with it."
            )
        prompt = expand(request.prompt_ids, self.policy.image_token_id, request.media)
        return Row(request, Future(), prompt, Draws(request.sampling.seed))

    def _serve(self) -> None:
        running = RunningBatch(self._resources)
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
                running = RunningBatch(self._resources)
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

    def _receive(self, block: bool) -> list[Row]:
        """Everything that waits. An idle engine lingers while requests keep coming: what starts together stays together."""
        arrived: list[Row] = []
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


def _fail(rows: Collection[Row], reason: str) -> None:
    for row in rows:
        if not row.future.done():
            row.future.set_exception(EngineError(reason))
