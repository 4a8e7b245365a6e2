"""An async env that blocks its thread holds up no other episode, no deadline and no stop."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from testing.episodes import a_task

from vlmrl import Env, RetryTurn, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvError, EnvSession
from vlmrl.utils import user_loop

Step = tuple[dict[str, Any], bool, dict[str, Any]]


class Plain(Env):
    def step(self, response_text: str) -> Step:
        return obs("plain"), True, {"reward": 1.0}


class Async(Env):
    async def step(self, response_text: str) -> Step:  # type: ignore[override]
        return obs("async"), True, {"reward": float(threading.get_ident())}


def session_of(env: type[Env]) -> EnvSession:
    return EnvSession(resolve_env(env), a_task(), max_turns=2, timeout=600, max_retries=0)


async def played(env: type[Env]) -> float | None:
    """The reward of one step."""
    session = session_of(env)
    await session.start()
    try:
        return (await session.step("a")).reward
    finally:
        await session.close()


async def test_an_async_env_that_blocks_is_named_and_others_go_on():
    begun, release = threading.Event(), threading.Event()

    class Blocks(Env):
        is_closed = False

        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            begun.set()
            assert release.wait(600)  # as requests.get() without an answer
            return obs("late"), True, {"reward": 0.0}

        async def close(self) -> None:  # type: ignore[override]
            Blocks.is_closed = True

    before, living = await played(Async), session_of(Async)
    blocking = session_of(Blocks)
    await living.start()
    await blocking.start()
    blocking._timeout = 0.1
    late = asyncio.create_task(blocking.step("a"))
    try:
        assert await asyncio.to_thread(begun.wait, 600)
        assert await played(Plain) == 1.0
        with pytest.raises(
            EnvError, match=r"timed out after 0.1 s .* an env blocks the event loop of all async envs: make"
        ):
            await late
        assert await played(Async) != before  # in a loop of another thread
        assert not Blocks.is_closed  # while its step goes on
    finally:
        release.set()
    assert (await living.step("a")).reward == before  # an env stays in its loop, to which its connections belong
    await living.close()


async def test_a_loop_is_not_blocked_because_the_callers_own_stood_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_loop, "ANSWER_SECONDS", 0.0)
    loop = user_loop.UserLoop("test")
    first = loop.current()
    answered = threading.Event()

    async def answer() -> None:
        for _ in range(20):  # rounds of the loop: the answer to the check takes fewer
            await asyncio.sleep(0)
        answered.set()

    checking = asyncio.create_task(loop.replace_if_blocked())
    asyncio.get_running_loop().call_soon(lambda: asyncio.run_coroutine_threadsafe(answer(), first.loop))
    asyncio.get_running_loop().call_soon(answered.wait, 600)
    assert not await checking
    assert loop.current() is first
    loop.close()


class Deleted(Env):
    """Closes when it is deleted, as wrappers of simulators do, and that may block."""

    threads: ClassVar[list[str]]
    begun: ClassVar[threading.Event]
    release: ClassVar[threading.Event]

    def __del__(self) -> None:
        self.threads.append(threading.current_thread().name)

    def step(self, response_text: str) -> Step:
        if response_text == "raise":
            raise OSError("the simulator is gone")
        if response_text == "reject":
            raise RetryTurn("again")
        if response_text == "hang":
            self.begun.set()
            assert self.release.wait(600)
        return obs("on"), False, {}


class DeletedAsync(Deleted):
    async def step(self, response_text: str) -> Step:  # type: ignore[override]
        return super().step(response_text)

    async def close(self) -> None:  # type: ignore[override]
        raise OSError("the simulator is gone")


class NeverBuilt(Deleted):
    def __init__(self, task: Any) -> None:
        super().__init__(task)
        raise OSError("no simulator")


async def play_once(session: EnvSession, response: str) -> None:
    """One step, which a stop of the run may cancel."""
    try:
        with suppress(EnvError, RetryTurn):
            await session.start()
            await session.step(response)
    except asyncio.CancelledError:
        await session.abandon()
    await session.close()


@pytest.mark.parametrize(
    ("env", "response"),
    [
        *((Deleted, response) for response in ("play", "raise", "reject", "hang", "stop")),
        *((DeletedAsync, response) for response in ("play", "raise", "reject")),
        (NeverBuilt, "play"),
    ],
)
async def test_an_env_is_deleted_in_no_thread_that_others_need(env: type[Deleted], response: str):
    env.threads, env.begun, env.release = [], threading.Event(), threading.Event()
    session = session_of(env)
    if response == "hang":
        session._timeout = 0.1
    # What refers to itself is deleted by the collection below, in this thread.
    gc.disable()
    try:
        playing = asyncio.create_task(play_once(session, "hang" if response == "stop" else response))
        if response == "stop":
            assert await asyncio.to_thread(env.begun.wait, 600)
            playing.cancel()
        await playing
        env.release.set()
        assert session.thread_free is not None
        await asyncio.wrap_future(session.thread_free)
        del session, playing
        gc.collect()
        await asyncio.sleep(0)
    finally:
        env.release.set()
        gc.enable()
    assert env.threads and all(name.startswith(("vlmrl-env-", "vlmrl-call-")) for name in env.threads)
