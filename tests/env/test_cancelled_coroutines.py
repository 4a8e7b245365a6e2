"""A user's coroutine whose wait is cancelled before it begins: it is closed, without Python's warning."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from testing.episodes import a_task

from vlmrl import Env, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvSession
from vlmrl.utils.user_loop import UserLoop


class Async(Env):
    """``format_observation`` is awaited after ``step``."""

    async def step(self, response_text):
        return obs("seen"), False, {"reward": 1.0}

    async def format_observation(self, observation):
        return {"role": "user", "content": observation["obs_str"]}


def session_of(env: type[Env]) -> EnvSession:
    return EnvSession(resolve_env(env), a_task(), max_turns=2, timeout=600, max_retries=0)


async def cancelled(playing: asyncio.Task) -> None:
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def ended(session: EnvSession) -> None:
    """All calls in the env's thread have ended, and what they returned is gone."""
    assert session._thread is not None
    await session._thread.run(int)
    await session.close()
    gc.collect()


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_that_a_cancelled_call_returns_later_is_closed():
    entered, go_on, steps = threading.Event(), threading.Event(), []

    class Late(Env):
        def step(self, response_text):
            entered.set()
            assert go_on.wait(600)
            steps.append(self.later())
            return steps[0]

        async def later(self):
            raise AssertionError("nobody waits for it")

    session = session_of(Late)
    await session.start()
    playing = asyncio.create_task(session.step("a"))
    assert await asyncio.to_thread(entered.wait, 600)
    await cancelled(playing)
    go_on.set()
    await ended(session)
    assert steps[0].cr_frame is None  # closed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("iterations", range(12))
async def test_a_step_is_cancelled_after_any_iteration_of_the_loop(iterations):
    session = session_of(Async)
    await session.start()
    playing = asyncio.create_task(session.step("a"))
    for _ in range(iterations):
        await asyncio.sleep(0)
    await cancelled(playing)
    await ended(session)


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_that_is_cancelled_before_it_began_in_the_envs_loop_never_begins():
    begun: list[str] = []

    async def step():
        begun.append("step")

    loop, go_on = UserLoop("test"), threading.Event()
    await loop.run(asyncio.sleep(0))
    loop.current().loop.call_soon_threadsafe(go_on.wait)
    playing = asyncio.create_task(loop.run(step()))
    await asyncio.sleep(0)
    await cancelled(playing)
    go_on.set()
    await loop.run(asyncio.sleep(0))
    loop.close()
    gc.collect()
    assert not begun
