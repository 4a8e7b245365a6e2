"""An async env that blocks its thread holds up no other episode, no deadline and no stop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from testing.episodes import a_task

from vlmrl import Env, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvError, EnvSession

Step = tuple[dict[str, Any], bool, dict[str, Any]]


class Plain(Env):
    def step(self, response_text: str) -> Step:
        return obs("plain"), True, {"reward": 1.0}


class Async(Env):
    async def step(self, response_text: str) -> Step:  # type: ignore[override]
        return obs("async"), True, {"reward": float(threading.get_ident())}


async def played(env: type[Env], timeout: float = 600.0) -> float | None:
    """The reward of one step."""
    session = EnvSession(resolve_env(env), a_task(), max_turns=2, timeout=timeout, max_retries=0)
    await session.start()
    try:
        return (await session.step("a")).reward
    finally:
        await session.close()


async def test_an_async_env_that_blocks_is_named_and_others_go_on():
    begun, release = threading.Event(), threading.Event()

    class Blocks(Env):
        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            begun.set()
            assert release.wait(600)  # as requests.get() without an answer
            return obs("late"), True, {"reward": 0.0}

    before = await played(Async)
    blocking = asyncio.create_task(played(Blocks, timeout=0.2))
    try:
        assert await asyncio.to_thread(begun.wait, 600)
        assert await played(Plain) == 1.0
        with pytest.raises(
            EnvError, match=r"timed out after 0.2 s .* an env blocks the event loop of all async envs: make"
        ):
            await blocking
        after = await played(Async)
    finally:
        release.set()
    assert before != after  # in a loop of another thread
