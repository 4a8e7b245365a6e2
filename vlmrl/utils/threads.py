"""Threads and event loops: a pool of daemon threads for plain functions, a loop in a thread, and the loop of a program.

asyncio's default pool has few threads, moves work between them and keeps the process alive behind a hung call. These do
not: an env owns one (`DaemonPool("env")`), the media store a few, and none of them outlives the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """``size`` daemon threads that take calls from one queue; with size 1, all calls run in order in one thread."""

    def __init__(self, name: str, size: int = 1) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._size = size
        for index in range(size):
            threading.Thread(target=self._work, name=f"vlmrl-{name}-{index}", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled: what is queued will be called
        self._queue.put((future, function, args))
        return future

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(*args)``. Cancelling gives up the wait, never the call: a `close` must not get lost."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """Let the threads end after what is queued already."""
        for _ in range(self._size):
            self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:  # whatever a user's code raises belongs to the caller
                future.set_exception(_harmless(error))
            del call, future, function, args  # an idle thread keeps nothing alive


class LoopThread:
    """An event loop in a daemon thread, where time-outs keep their time while the main loop is busy, for example training."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=f"vlmrl-{name}", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` from another loop; to be cancelled there cancels it here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The same for who has no loop. Raises TimeoutError after ``timeout`` seconds, and cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()


def run_awake(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` with a loop that never sleeps for more than a second.

    Python notices a signal between two instructions. One that comes just before the loop falls asleep in the system is noticed when
    something wakes it, and while all that runs are hung envs, nothing does.
    """

    async def stay_awake() -> None:
        while True:
            await asyncio.sleep(1.0)

    async def main() -> T:
        awake = asyncio.create_task(stay_awake())
        try:
            return await coroutine
        finally:
            awake.cancel()

    return asyncio.run(main())


def _harmless(error: BaseException) -> BaseException:
    """As a RuntimeError, if asyncio would take it for its own: a cancellation, or the end of a coroutine or of the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    harmless = RuntimeError(f"{type(error).__name__}: {error}")
    harmless.__cause__ = error
    return harmless
