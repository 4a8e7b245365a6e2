"""What the turn loop asks of an inference engine, and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from vlmrl.types import Completion, MediaItem


class EngineError(Exception):
    """An engine that did not answer, after its own retries: the trajectory is lost, never scored."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one reply. ``temperature`` 0 is greedy; ``top_k`` 0 is off; the same ``seed`` draws the same numbers."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One reply to sample: ids with one placeholder per image, and the images in order.

    Requests of one trajectory share ``trajectory_id``, so that an engine can keep what it computed for earlier turns. Ids sort
    in task order. Where an engine tells experts, those of the first ``routing_from`` tokens, images expanded, are known already.
    """

    trajectory_id: str
    prompt_ids: Sequence[int]
    media: Sequence[MediaItem] = field(default_factory=list)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256))
    routing_from: int = 0


class Engine(Protocol):
    """Samples replies. ``policy_version`` counts the weight updates it has received."""

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: Request) -> Completion:
        """One reply. Raises EngineError where none can be had, ValueError for a request that is wrong in itself.

        A weight update may come in its midst: ``policy_versions`` say under which weights each of its tokens was sampled.
        """
        ...

    def release(self, trajectory_id: str) -> None:
        """The trajectory is over: forget what was kept for it."""
        ...

    async def pause(self) -> None:
        """Stop sampling between two tokens, and return once nothing reads the weights any more. To pause twice is to pause once.

        Requests in flight keep the tokens they have; they and those that come meanwhile wait for :meth:`resume`.
        """
        ...

    async def resume(self) -> None:
        """Go on. Where the weights changed, nothing is used that the old ones computed: keys and values, features of images.

        An engine that takes turns with a trainer stays paused where that has failed and cannot leave their GPUs.
        """
        ...

    def close(self) -> None: ...


@asynccontextmanager
async def paused(engine: Engine) -> AsyncIterator[None]:
    """Inside, the engine samples nothing: its weights may be trained or exchanged."""
    try:
        await engine.pause()
        yield
    finally:
        await engine.resume()


@runtime_checkable
class BatchEngine(Engine, Protocol):
    """An engine that can also sample many requests as one batch, whose make-up is then the caller's."""

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]: ...


class RunEngine(Engine, Protocol):
    """What a run asks of its engine beside the episodes. ``images_encoded`` counts the images that went through the model."""

    @property
    def images_encoded(self) -> int: ...

    def weights_changed(self, policy_version: int) -> None:
        """The weights are new: forget all that the old ones computed. Called only while the engine is paused."""
        ...


class LockstepBatching:
    """An engine that waits until every live trajectory has asked, then samples all in task order: the deterministic mode.

    The runner calls :meth:`join` before trajectories start and :meth:`leave` as each one ends.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self._live = 0
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: set[asyncio.Task[None]] = set()

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    def join(self, count: int) -> None:
        self._live += count

    def leave(self) -> None:
        self._live -= 1
        self._start_if_complete()

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start_if_complete()
        try:
            return await future
        except asyncio.CancelledError:  # who gave up waits no more: nothing is to be sampled for nobody
            self._waiting = [pair for pair in self._waiting if pair[1] is not future]
            raise

    def release(self, trajectory_id: str) -> None:
        self.engine.release(trajectory_id)

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    def close(self) -> None:
        self.engine.close()

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._live:
            wave, self._waiting = sorted(self._waiting, key=lambda pair: pair[0].trajectory_id), []
            task = asyncio.create_task(self._run(wave))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, wave: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        try:
            completions = await self.engine.generate_batch([request for request, _ in wave])
        except BaseException as error:
            for _, future in wave:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), completion in zip(wave, completions, strict=True):
            if not future.done():
                future.set_result(completion)
