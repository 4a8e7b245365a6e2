"""The time limit of a response does not include the work that prepares its request."""

from __future__ import annotations

import asyncio

import pytest
from testing.episodes import script

from vlmrl.engine.base import PreparingEngine, Request, SamplingParams, generate_within
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.types import Completion


class Slow:
    """Prepares and samples in turns of the event loop, more than a limit of 0 seconds allows."""

    policy_version = 0

    def __init__(self, at: str) -> None:
        self.at = at

    async def prepare(self, request: Request) -> None:
        await self._work("prepare")

    async def generate(self, request: Request) -> Completion:
        await self._work("generate")
        return Completion([1], [0.0], "stop", [0], 1)

    async def _work(self, where: str) -> None:
        for _ in range(5 if where == self.at else 0):
            await asyncio.sleep(0)

    def release(self, trajectory_id: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    def close(self) -> None: ...


REQUEST = Request("t", [1], [], SamplingParams(1))


def test_only_the_response_has_a_limit():
    assert asyncio.run(generate_within(0, Slow("prepare"), REQUEST)).token_ids == [1]
    with pytest.raises(TimeoutError):
        asyncio.run(generate_within(0, Slow("generate"), REQUEST))


def test_engines_that_prepare_nothing_need_no_method_for_it():
    assert isinstance(Slow(""), PreparingEngine) and hasattr(ServerEngine, "prepare")
    assert not isinstance(script(["a"]), PreparingEngine)
