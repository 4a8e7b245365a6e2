"""Threads whose calls have deadlines that do not include the time in the queue, and loops that a process shares."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from vlmrl.utils.threads import DaemonPool, LoopThread

T = TypeVar("T")

_LOCK = threading.Lock()
_LOOPS: dict[str, LoopThread] = {}


class DeadlineError(Exception):
    """A call did not return within its deadline."""


class WorkPool:
    """``size`` daemon threads for calls that are awaited in one event loop at a time.

    A call's deadline begins when a thread takes it, not while it waits in the queue. A thread whose call misses its deadline is
    replaced, so that calls that hang hold up nobody else.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._workers = {DaemonPool(name) for _ in range(size)}
        self._idle = list(self._workers)
        self._waiting: deque[asyncio.Future[DaemonPool]] = deque()
        self._closed = False

    async def run(self, seconds: float, function: Callable[..., T], *args: Any, first: bool = False) -> T:
        """``function(*args)`` in a thread; ``first`` puts it at the head of the queue. Cancellation ends the wait, not the call.

        Raises:
            DeadlineError: it did not return within ``seconds`` of its start.
        """
        return await shielded(self._run(seconds, function, *args, first=first))

    def close(self) -> None:
        """End the threads after the calls that they are in. Calls still in the queue raise RuntimeError."""
        self._closed = True
        for worker in list(self._workers):
            worker.close()

    async def _run(self, seconds: float, function: Callable[..., T], *args: Any, first: bool) -> T:
        worker = await self._take(first)
        try:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are closed.")
            async with asyncio.timeout(seconds) as deadline:
                result: T = await worker.run(function, *args)
                return result
        except TimeoutError as error:
            if not deadline.expired():
                raise
            worker = self._replaced(worker)
            raise DeadlineError(f"no result within {seconds:g} s") from error
        finally:
            self._give(worker)

    async def _take(self, first: bool) -> DaemonPool:
        if self._idle:
            return self._idle.pop()
        turn: asyncio.Future[DaemonPool] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if first else self._waiting.append)(turn)
        try:
            return await turn
        except asyncio.CancelledError:  # the event loop ends
            if turn.done() and not turn.cancelled():
                self._give(turn.result())
            raise

    def _give(self, worker: DaemonPool) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _replaced(self, worker: DaemonPool) -> DaemonPool:
        worker.close()  # its thread ends when the call returns, if it ever does
        self._workers.remove(worker)
        self._workers.add(new := DaemonPool(self._name))
        return new


class SharedTasks:
    """Computes each value once, however many coroutines of one event loop await it at the same time; none of them holds a thread."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def get(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``make()``, or of the call for ``key`` that is already running. Its error is raised in all who wait.

        Cancellation ends the wait, not the call.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._tasks.pop(key))
            task.add_done_callback(_retrieve)
        result: T = await asyncio.shield(task)
        return result


async def shielded(call: Coroutine[Any, Any, T]) -> T:
    """Await ``call``. Cancellation ends the wait, not the call."""
    task = asyncio.create_task(call)
    task.add_done_callback(_retrieve)
    return await asyncio.shield(task)


def shared_loop(name: str) -> LoopThread:
    """The process's loop thread of this name, started at its first use."""
    with _LOCK:
        if name not in _LOOPS:
            _LOOPS[name] = LoopThread(name)
        return _LOOPS[name]


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark an error as seen: those who awaited it may have been cancelled."""
    if not task.cancelled():
        task.exception()
