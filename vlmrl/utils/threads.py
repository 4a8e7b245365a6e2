"""Threads and event loops that never keep a process alive: daemon pools, a loop in a thread, a program's main loop and its end.

asyncio's default pool has few threads, runs successive calls in different ones, and waits for hung calls when the process exits.
Each env therefore owns a pool of one daemon thread, and work on images has a pool of its own (`work_pool.py`). What a user's coroutine
passes to ``asyncio.to_thread`` has a daemon thread of its own.

Python before 3.14 unwinds a daemon thread that wants to go on while the interpreter ends. Out of C++ code, such as torch's, that
aborts the process (status 134). So a program waits a little for threads that compute, then ends without them: see
:func:`keeping_exit_status`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.thread import _python_exit, _threads_queues
from functools import partial
from typing import Any, Generic, TypeVar

from vlmrl.utils.users_line import text_of

T = TypeVar("T")

GRACE_SECONDS = 2.0  # at the end of a program, for threads that compute
END_SECONDS = 10.0  # for the cancelled tasks of a loop to end, and for threads that are no daemons if a call hangs
# At the end of a program, for processes and threads that are no daemons: one may upload a model.
PROCESS_SECONDS = 600.0
OUT_OF_A_LOOP = (SystemExit, KeyboardInterrupt, IndexError)
"""What ends a loop: tasks that call `exit()`, as a policy's code does, and nest_asyncio, which takes callbacks that were counted."""
_BUSY: set[threading.Thread] = set()
_ENDING = threading.Event()  # the interpreter ends: threads take no more calls
_LIMITED = threading.Event()  # the time of what Python waits for at the end is limited


def check_not_forked(process: int) -> None:
    """Raises RuntimeError in a fork of the ``process`` that started the threads to call: they are missing here, and never answer."""
    if os.getpid() != process:
        raise RuntimeError(
            "vlmrl cannot work in a process that is forked after vlmrl has worked in its parent, as its threads are missing: start "
            "the process by multiprocessing.get_context('spawn') or as a program of its own."
        )


class DaemonPool:
    """``size`` daemon threads that take calls from one queue. With size 1, calls run one by one, in order, in the same thread."""

    def __init__(self, name: str, size: int = 1) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._name = name
        self._size = 0
        self._process = os.getpid()
        for _ in range(size):
            self.add_thread()

    def add_thread(self) -> None:
        threading.Thread(target=self._work, name=f"vlmrl-{self._name}-{self._size}", daemon=True).start()
        self._size += 1

    def end_thread(self) -> None:
        """End one thread after the calls that are already queued."""
        self._size -= 1
        self._queue.put(None)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        check_not_forked(self._process)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # no longer cancellable: every queued call is made
        self._queue.put((future, function, args))
        return future

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(*args)``. Cancellation ends the wait, not the call, so that a queued ``close`` still runs."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """End the threads after the calls that are already queued."""
        while self._size > 0:
            self.end_thread()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None and not _ENDING.is_set():
            future, function, args = call
            try:
                with busy():
                    result = function(*args)
                future.set_result(result)
                del result
            except BaseException as error:  # a user's code may raise anything: the caller gets it
                future.set_exception(as_error(error))
            del call, future, function, args  # an idle thread must not keep them alive


class DaemonExecutor(ThreadPoolExecutor):
    """A loop's default executor, as of ``asyncio.to_thread``: each call has a daemon thread of its own.

    On a machine with one core asyncio's own has five threads. Five calls of an env that hang would hold up the trainer's and all
    others for ever, and the end of the loop and of the process, which wait for one. The number of threads is not limited.
    """

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        thread = DaemonPool("call")
        call = thread.submit(partial(function, *args, **options))
        thread.close()
        return call


class LoopThread:
    """An event loop in a daemon thread, whose timeouts are exact even while the main loop is blocked, for example by training."""

    def __init__(self, name: str) -> None:
        self.loop = _LastingLoop(OUT_OF_A_LOOP)
        self.loop.set_default_executor(DaemonExecutor())
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name=f"vlmrl-{name}", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` from another loop. Cancelling the caller cancels it."""
        self._check(coroutine)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run ``coroutine`` and block until it ends. After ``timeout`` seconds, cancel it and raise TimeoutError."""
        self._check(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the running tasks and end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)

    def _check(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            check_not_forked(self._process)
        except RuntimeError:
            coroutine.close()
            raise

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            if not task.cancelling():  # or it cleans up, which a second one would interrupt
                task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()


async def await_user_code(value: Awaitable[T]) -> T:
    """Await a user's coroutine. What it raises besides an Exception becomes a RuntimeError, or it would end the event loop.

    A CancelledError too, unless this task is being cancelled: libraries let it out of their own cancelled tasks.
    """
    try:
        return await value
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # it was left alone, and its loop has ended
            raise error from None
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise as_error(error) from error


def close_unawaited(value: Any) -> None:
    """Close a coroutine that will not be awaited, and its awaitable argument ``value``, to avoid Python's warnings."""
    while inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        awaited = inspect.getcoroutinelocals(value).get("value")
        value.close()
        value = awaited


def drop_result(call: Future[Any]) -> None:
    """Drop the result of an ended call that is no longer awaited."""
    if not call.cancelled() and call.exception() is None:
        close_unawaited(call.result())


class _LastingLoop(asyncio.SelectorEventLoop):
    """A loop that runs until it is stopped, also after ``errors`` of its tasks. Whoever awaits such a task gets its error."""

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._errors = errors
        self._is_stopped = False

    def stop(self) -> None:
        super().stop()
        self._is_stopped = True

    def run_forever(self) -> None:
        try:
            while True:
                try:
                    return super().run_forever()
                except self._errors:
                    if self._is_stopped:  # in the same round, which asyncio forgets
                        return None
        finally:
            self._is_stopped = False


def run_awake(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` with a loop that wakes up every second, so that Ctrl-C always works, and that ends.

    Python handles a signal between two bytecode instructions. A signal that arrives just before the loop blocks in the system call is
    handled only when the loop wakes up, which never happens while every task waits for a hung env.

    The loop runs on after a task that raises SystemExit, or a run would end as if it were complete; ``coroutine``'s own becomes a
    RuntimeError.

    ``asyncio.run`` waits at its end for each task and each call in a thread that is left. A user's task may ignore that it is
    cancelled, and a call may hang: after :data:`END_SECONDS` both are left alone.
    """

    async def stay_awake() -> None:
        while True:
            await asyncio.sleep(1.0)

    async def main() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())
        awake = asyncio.create_task(stay_awake())
        try:
            return await coroutine
        except SystemExit as error:  # the loop would run on
            raise as_error(error) from error
        finally:
            awake.cancel()

    runner = asyncio.Runner(loop_factory=lambda: _LastingLoop((SystemExit,)))
    try:
        return runner.run(main())
    finally:
        loop = runner.get_loop()
        try:
            loop.run_until_complete(_cancel_all())
        finally:
            loop.close()
            asyncio.set_event_loop(None)


async def _cancel_all() -> None:
    """Cancel all tasks of the loop but this one, then close its generators. Waits :data:`END_SECONDS` at most."""
    loop, left = asyncio.get_running_loop(), asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            if left:
                await asyncio.wait(left)
            await loop.shutdown_asyncgens()
    if not all(task.done() for task in left):
        loop.set_exception_handler(lambda *_: None)  # or it prints that they were destroyed


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Within the context this thread runs code that the interpreter must not end under."""
    thread = threading.current_thread()
    _BUSY.add(thread)
    try:
        yield
    finally:
        _BUSY.discard(thread)


@contextlib.contextmanager
def keeping_exit_status() -> Iterator[None]:
    """For a whole program: it ends with its own status, also if daemon threads still compute, or hang, at its end.

    Such a program ends without the interpreter's finalization, after the functions that are registered with :mod:`atexit`. Its status
    is that of this context, whatever comes after it.
    """
    status = 1  # of an uncaught exception
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        status = 130
        raise
    finally:
        # Python calls these in reverse order, before it waits for the threads of pools, of which one may hang.
        lasting = _lasting()
        if lasting:
            threading._register_atexit(_limit_lasting, lasting, status)  # type: ignore[attr-defined]
        if _BUSY:
            threading._register_atexit(_end_without_finalization, lasting, status)  # type: ignore[attr-defined]


def _lasting() -> list[Any]:
    """The processes and threads that Python waits for when the program ends: those that are no daemons, and all threads of pools."""
    processes = [each for each in multiprocessing.active_children() if not each.daemon]
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return processes + [each for each in others if not each.daemon or each in _threads_queues]


def _limit_lasting(lasting: list[Any], status: int) -> None:
    """Called when the program ends, before Python waits for processes and threads, such as one whose result an env has given up."""
    if not _LIMITED.is_set():
        _LIMITED.set()
        threading.Thread(target=_end_lasting, args=(lasting, status), daemon=True).start()


def _end_lasting(lasting: list[Any], status: int) -> None:
    time.sleep(END_SECONDS)
    if names := ", ".join(each.name for each in lasting if each.is_alive()):
        with contextlib.suppress(Exception):
            limit = f"it ends in {PROCESS_SECONDS:g} s"
            print(f"vlmrl: the program waits for what it has started ({names}); {limit}", file=sys.stderr)
    time.sleep(PROCESS_SECONDS)
    for process in _processes_of(lasting):
        process.kill()
    time.sleep(END_SECONDS)
    if any(each.is_alive() for each in lasting):
        _end_now(status)


def _processes_of(lasting: list[Any]) -> list[Any]:
    return [each for each in lasting if not isinstance(each, threading.Thread)]


def _end_without_finalization(lasting: list[Any], status: int) -> None:
    """Called before the functions that are registered with atexit: it calls them, if it does not return."""
    if _is_idle_within(GRACE_SECONDS):
        return
    threading.Thread(target=_python_exit, daemon=True).start()  # ends the idle threads of all pools
    until = time.monotonic() + END_SECONDS
    others = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    for thread in others:  # it may finish something
        thread.join(max(0.0, until - time.monotonic()))
    if left := ", ".join(thread.name for thread in others if thread.is_alive()):
        with contextlib.suppress(Exception):
            print(f"vlmrl: the process ends while threads still work: {left}", file=sys.stderr)
    _limit_lasting(_processes_of(lasting), status)  # the registered functions wait for them
    _end_now(status)


def _end_now(status: int) -> None:
    atexit.unregister(_wait_for_busy_threads)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed
            stream.flush()
    os._exit(status)


@atexit.register
def _wait_for_busy_threads() -> None:
    """Let the calls in progress end, and begin no others: for a script whose exit status is not known here."""
    _ENDING.set()
    _is_idle_within(GRACE_SECONDS)


def _is_idle_within(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(thread.is_alive() for thread in tuple(_BUSY)):
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class SingleFlight(Generic[T]):
    """Computes each value once, however many threads request it at the same time.

    ``value, computed = flight.get(key, cache.get, compute)``, where ``compute()`` also stores its result for ``cache.get``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, Future[T]] = {}

    def get(self, key: str, find: Callable[[str], T | None], make: Callable[[], T]) -> tuple[T, bool]:
        """``find(key)`` unless it is None; else the result of ``make()``, called by one thread while the others wait for it.

        The second item is whether this call made the value. An error of ``make`` is raised in all waiting threads; the next call
        makes the value again.
        """
        with self._lock:
            value = find(key)
            if value is not None:
                return value, False
            pending = self._pending.get(key)
            if pending is None:
                self._pending[key] = Future()
        if pending is not None:
            return pending.result(), False
        try:
            value = make()
        except BaseException as error:
            self._take(key).set_exception(error)
            raise
        self._take(key).set_result(value)
        return value, True

    def _take(self, key: str) -> Future[T]:
        with self._lock:
            return self._pending.pop(key)


def as_error(error: BaseException) -> BaseException:
    """``error``, or a RuntimeError in place of one that asyncio would act on: a cancellation, or the end of a coroutine or loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    wrapped.__cause__ = error
    return wrapped
