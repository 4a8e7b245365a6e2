"""The interface between the turn loop and an inference engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from vlmrl.types import Completion, MediaItem


class EngineError(Exception):
    """The engine returned no response, even after retries. The trajectory fails and gets no reward."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response. ``temperature`` 0 is greedy; ``top_k`` 0 is off; the same ``seed`` draws the same numbers."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One response to sample: ``Request("step1/0/3", [1, 151655, 2], [image], SamplingParams(256))``."""

    trajectory_id: str
    """The same for all turns of a trajectory, so that the engine can keep their KV cache. Ids sort in task order."""
    prompt_ids: Sequence[int]
    """The whole prompt, with one placeholder id per image."""
    media: Sequence[MediaItem] = field(default_factory=list)
    """The images, in the order of their placeholders."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256))
    routing_from: int = 0
    """Index of the first token, images expanded, whose experts the engine should return: those of earlier ones are known."""


def check_placeholders(request: Request, image_token_id: int | None) -> None:
    """Raise ValueError unless the prompt has one placeholder per image."""
    placeholders = 0 if image_token_id is None else request.prompt_ids.count(image_token_id)
    if placeholders != len(request.media):
        raise ValueError(
            f"trajectory {request.trajectory_id}: the prompt has {placeholders} image placeholders, but "
            f"{len(request.media)} images came with it."
        )


class Engine(Protocol):
    """Samples responses. ``policy_version`` counts the weight updates it has received."""

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: Request) -> Completion:
        """One response. A weight update may interrupt it: ``policy_versions`` has the version that sampled each token.

        Raises EngineError if the engine fails, ValueError if the request itself is invalid.
        """
        ...

    def release(self, trajectory_id: str) -> None:
        """The trajectory has ended: forget everything kept for it."""
        ...

    async def pause(self) -> None:
        """Stop sampling between two tokens, and return once nothing reads the weights any more. A second pause changes nothing.

        Requests in flight keep their tokens; they and new requests wait for :meth:`resume`.
        """
        ...

    async def resume(self) -> None:
        """Continue. After a weight update nothing computed with the old weights is used: no KV cache, no image features.

        A colocated engine stays paused if the trainer has failed and cannot offload its memory.
        """
        ...

    def close(self) -> None:
        """Requests that wait or are in flight raise EngineError, and so do later ones. A second close changes nothing."""
        ...


@runtime_checkable
class PreparingEngine(Engine, Protocol):
    """An engine whose requests take work of this process before they are sent: it waits in a queue for it, maybe for long."""

    async def prepare(self, request: Request) -> None: ...


async def generate_within(seconds: float, engine: Engine, request: Request) -> Completion:
    """``engine.generate(request)``. Raises TimeoutError after ``seconds``, in which the work to prepare the request does not count."""
    if isinstance(engine, PreparingEngine):
        await engine.prepare(request)
    async with asyncio.timeout(seconds):
        return await engine.generate(request)


@asynccontextmanager
async def paused(engine: Engine) -> AsyncIterator[None]:
    """Within the context the engine samples nothing, so its weights may be trained or replaced."""
    try:
        await engine.pause()
        yield
    finally:
        await engine.resume()


@runtime_checkable
class BatchEngine(Engine, Protocol):
    """An engine that can also sample several requests as one batch, which the caller composes."""

    async def generate_batch(self, requests: Sequence[Request]) -> Sequence[Completion | BaseException]:
        """The responses; of a request that failed, its error, which fails no other."""
        ...


class RunEngine(Engine, Protocol):
    """What a training run needs of its engine beyond what the turn loop needs."""

    @property
    def images_encoded(self) -> int:
        """Number of images that were encoded."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of work since the start by part: ``vision``, ``prefill``, ``decode``. Empty: the engine does not say."""
        ...

    def weights_changed(self, policy_version: int) -> None:
        """The weights have changed: forget everything computed with the old ones. Called only while the engine is paused."""
        ...
