"""The event loops of users' coroutines: of all async agents, of all async envs, and of all async rewards."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
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

    async def run_within(self, seconds: float, awaitable: Awaitable[T]) -> T:
        """Await ``awaitable`` in the current loop. Its time begins when the loop comes to it, after others that block the loop.

        Raises TimeoutError.
        """
        outcome: Future[T] = Future()
        call, answered = await self._begin(seconds, awaitable, outcome), asyncio.wrap_future(outcome)
        try:
            await asyncio.wait({answered}, timeout=seconds)
            if outcome.done():
                return await answered
            hint = f"; it blocks the event loop of all async {self._name}: make it a plain function, not an async one"
            raise TimeoutError(f"no answer in {seconds:g} s{hint * await self.replace_if_blocked()}")
        finally:
            call.cancel()
            answered.cancel()

    async def _begin(self, seconds: float, awaitable: Awaitable[T], outcome: Future[T]) -> asyncio.Future[None]:
        """The call of ``awaitable`` when it has begun: in another loop if the first one stays blocked."""
        while True:
            thread, began = self.current(), Future[None]()
            call = asyncio.ensure_future(self.run(_report(awaitable, began, outcome), thread))
            try:
                while not began.done():
                    await asyncio.wait({asyncio.wrap_future(began)}, timeout=seconds)
                    is_blocked = not began.done() and (thread is not self.current() or await self.replace_if_blocked())
                    if is_blocked and began.cancel():
                        break
                else:
                    return call
            except asyncio.CancelledError:
                call.cancel()
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


async def _report(value: Awaitable[T], began: Future[None], outcome: Future[T]) -> None:
    """Await ``value``, unless ``began`` is cancelled: another loop awaits it then.

    A task's own result would arrive only after all coroutines that the loop has begun with it. Of a late one, nobody reads it.
    """
    if not began.set_running_or_notify_cancel():
        return
    began.set_result(None)
    try:
        outcome.set_result(await await_user_code(value))
    except BaseException as error:
        outcome.set_exception(as_error(error))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await await_user_code(awaitable)
    except KeyboardInterrupt as error:
        raise as_error(error) from error


REWARDS = UserLoop("rewards")
"""Of the rewards of groups and of agents' trajectories."""
atexit.register(REWARDS.close)
