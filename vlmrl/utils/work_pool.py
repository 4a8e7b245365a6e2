"""Threads whose calls have deadlines that do not include the time in the queue, and work that coroutines share."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vlmrl.utils.threads import DaemonPool, as_error

T = TypeVar("T")

_LOCK = threading.Lock()
_POOLS: list[WorkPool] = []


class DeadlineError(Exception):
    """A call did not return within its deadline."""


class WorkPool:
    """``size`` daemon threads for calls that are awaited in any event loop.

    A call's deadline begins when a thread takes it, not while it waits in the queue. For a thread whose call misses its deadline
    another one is started, so that calls that hang hold up nobody else.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._name = name
        self._threads = DaemonPool(name, size)
        self._waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, seconds: float, function: Callable[..., T], *args: Any, first: bool = False) -> T:
        """``function(*args)`` in a thread; ``first`` puts it at the head of the queue.

        Cancellation ends the wait. A call that has begun goes on, and one that is still in the queue is not made.

        Raises:
            DeadlineError: it did not return within ``seconds`` of its start.
        """
        if self._closed:
            raise self._closed_error()
        call = _Call(function, args)
        (self._waiting.appendleft if first else self._waiting.append)(call)
        self._threads.submit(self._make_next)
        result: asyncio.Future[T] = asyncio.wrap_future(call.future)
        try:
            while not result.done():
                left = call.seconds_left(seconds)
                if left <= 0 and self._gave_up(call):
                    raise DeadlineError(f"no result within {seconds:g} s")
                await asyncio.wait([result], timeout=None if left == math.inf else max(left, 0.001))
            return result.result()
        finally:
            if call.future.cancel():  # it has not begun, and never will
                call.args = ()
            result.cancel()

    def close(self) -> None:
        """End the threads after the calls that they are in. Calls still in the queue raise RuntimeError."""
        self._closed = True
        self._threads.close()

    def _make_next(self) -> None:
        """In a thread: make the call at the head of the queue, unless nobody waits for it any more."""
        call = self._waiting.popleft()
        if not call.future.set_running_or_notify_cancel():
            return
        if self._closed:
            call.future.set_exception(self._closed_error())
            return
        call.began = time.monotonic()
        try:
            result = call.function(*call.args)
        except BaseException as error:
            self._has_ended(call)
            call.future.set_exception(as_error(error))
        else:
            self._has_ended(call)
            call.future.set_result(result)

    def _gave_up(self, call: _Call) -> bool:
        """Start another thread for one whose call has no end, unless that has just ended."""
        with self._lock:
            if not call.has_ended:
                call.is_given_up = True
                self._threads.add_thread()
        return call.is_given_up

    def _has_ended(self, call: _Call) -> None:
        with self._lock:
            call.has_ended = True
            if call.is_given_up:
                self._threads.end_thread()  # another one took its place

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"the threads {self._name} are closed.")


@dataclass(eq=False)
class _Call:
    """A call in a pool's queue or in one of its threads. ``began`` is a time of ``time.monotonic``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)
    began: float | None = None
    has_ended: bool = False
    is_given_up: bool = False

    def seconds_left(self, seconds: float) -> float:
        return seconds if self.began is None else self.began + seconds - time.monotonic()


def cpu_pool() -> WorkPool:
    """The process's threads for work that the event loop must not do: decode, hash, resize and encode images, encode long texts.

    One for each core that the process may use. Calls that wait, for example for a network, would hold up all others.
    """
    with _LOCK:
        if not _POOLS:
            _POOLS.append(WorkPool("cpu", usable_cores()))
        return _POOLS[0]


def usable_cores() -> int:
    """How many cores this process may use: those of its affinity, where the system has that."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


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


async def abandonable(call: Coroutine[Any, Any, T]) -> T:
    """Await ``call``. Cancellation cancels the call, too, but does not wait for it: it may ignore that."""
    task = asyncio.create_task(call)
    task.add_done_callback(_retrieve)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark an error as seen: those who awaited it may have been cancelled."""
    if not task.cancelled():
        task.exception()
