"""The event loops of users' coroutines: of all async agents, and of all async envs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from vlmrl.utils.threads import LoopThread, as_error, await_user_code, close_unawaited
from vlmrl.utils.work_pool import abandonable

T = TypeVar("T")

ANSWER_SECONDS = 1.0  # in which a loop must answer, or a coroutine blocks it


class UserLoop:
    """An event loop in a thread of its own, so that a coroutine that blocks it harms no engine, no trainer and no deadline.

    A loop that is blocked, or that a coroutine has stopped, is replaced: :meth:`current` is a new one then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: LoopThread | None = None
        self._blocked: list[LoopThread] = []
        self._lock = threading.Lock()  # the loops of several threads may call

    async def run(self, awaitable: Awaitable[T], thread: LoopThread | None = None) -> T:
        """Await ``awaitable`` in the loop of ``thread``, by default the current one.

        Cancelling the caller cancels it, too, but does not wait for it: it may ignore that.
        What it raises besides an Exception becomes a RuntimeError, or it would end the loop for all.
        """
        loop = (thread or self.current()).loop
        call = asyncio.run_coroutine_threadsafe(_abandonable(awaitable), loop)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(close_unawaited, awaitable)
            raise

    def current(self) -> LoopThread:
        with self._lock:
            if self._thread is None or self._thread.loop.is_closed():
                self._thread = LoopThread(self._name)
            return self._thread

    async def replace_if_blocked(self) -> bool:
        """Whether the loop does not answer. Coroutines that start later get a new one."""
        thread = self._thread
        if thread is None or thread.loop.is_closed():
            return False
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop)
        await asyncio.wait({asyncio.wrap_future(answer)}, timeout=ANSWER_SECONDS)
        if answer.done():  # also if the caller's own loop stood still meanwhile
            return False
        with self._lock:
            if self._thread is thread:
                self._thread = None
                self._blocked.append(thread)
        return True

    def close(self) -> None:
        """Cancel what runs and end the threads. One that is blocked ends with its call, or with the process."""
        for thread in self._blocked:
            with suppress(RuntimeError):  # it has ended
                thread.loop.call_soon_threadsafe(thread.loop.stop)
        if self._thread is not None and not self._thread.loop.is_closed():
            self._thread.close()


async def _abandonable(awaitable: Awaitable[T]) -> T:
    # Made here: if this coroutine is cancelled before it begins, the inner ones would warn that they were never awaited.
    return await abandonable(_awaited(awaitable))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await await_user_code(awaitable)
    except KeyboardInterrupt as error:
        raise as_error(error) from error
