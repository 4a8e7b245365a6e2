"""Work in threads: deadlines that begin with the work, threads that are replaced, and tasks that many await."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from vlmrl.utils.threads import DaemonPool, LoopThread
from vlmrl.utils.work_pool import DeadlineError, SharedTasks, WorkPool, cpu_pool, usable_cores

LIMIT = 600.0  # seconds, for a machine that is ten times too slow


class Call:
    """A call that waits until it may end; ``order`` gets its name when it begins."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.order.append(self.name)
        self.entered.set()
        assert self.go.wait(LIMIT)
        return self.name


async def until(event: threading.Event) -> None:
    assert await DaemonPool("wait").run(event.wait, LIMIT)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(LIMIT):
            return await main

    return asyncio.run(limited())


def test_the_queue_is_in_order_except_for_what_goes_first():
    order: list[str] = []
    calls = {name: Call(name, order) for name in "abcd"}

    async def main():
        pool = WorkPool("work", 1)
        for call in (calls[name] for name in "bcd"):
            call.go.set()
        tasks = [asyncio.create_task(pool.run(LIMIT, calls["a"]))]
        await until(calls["a"].entered)
        tasks += [asyncio.create_task(pool.run(LIMIT, calls[name], first=name == "d")) for name in "bcd"]
        await asyncio.sleep(0)
        calls["a"].go.set()
        return await asyncio.gather(*tasks)

    assert run(main()) == ["a", "b", "c", "d"]
    assert order == ["a", "d", "b", "c"]


def test_a_deadline_begins_with_the_call_and_a_thread_that_misses_it_is_replaced():
    order: list[str] = []
    hung, late = Call("hung", order), Call("late", order)
    late.go.set()

    async def main():
        pool = WorkPool("work", 1)
        first = asyncio.create_task(pool.run(0.2, hung))
        await until(hung.entered)
        second = asyncio.create_task(pool.run(LIMIT, late))
        with pytest.raises(DeadlineError, match=r"no result within 0\.2 s"):
            await first
        return await second

    assert run(main()) == "late"
    hung.go.set()


def test_a_hung_call_that_ends_after_all_leaves_as_many_threads_as_before():
    hung = Call("hung", [])

    def threads() -> int:
        return sum(thread.name.startswith("vlmrl-leaving-") for thread in threading.enumerate())

    async def main():
        pool = WorkPool("leaving", 1)
        with pytest.raises(DeadlineError):
            await pool.run(0.05, hung)
        assert threads() == 2
        hung.go.set()
        while threads() > 1:
            await asyncio.sleep(0)
        return await pool.run(LIMIT, lambda: 7)

    assert run(main()) == 7


def test_an_error_of_a_call_is_its_own_also_a_timeout():
    def fails() -> None:
        raise TimeoutError("the disk")

    async def main():
        pool = WorkPool("work", 1)
        with pytest.raises(TimeoutError, match="the disk"):
            await pool.run(LIMIT, fails)
        return await pool.run(LIMIT, lambda: 7)

    assert run(main()) == 7


def test_a_cancelled_wait_ends_no_call_that_has_begun_and_makes_none_that_waits():
    order: list[str] = []
    calls = {name: Call(name, order) for name in "abc"}

    async def main():
        pool = WorkPool("work", 1)
        tasks = {name: asyncio.create_task(pool.run(LIMIT, call)) for name, call in calls.items()}
        await until(calls["a"].entered)
        for name in "ab":  # one runs, one waits
            tasks[name].cancel()
        await asyncio.wait([tasks["a"], tasks["b"]])
        for call in calls.values():
            call.go.set()
        return await tasks["c"]

    assert run(main()) == "c"
    assert order == ["a", "c"]


def test_a_call_that_nobody_awaits_keeps_nothing_of_its_arguments():
    """Or clients that leave a server's queue would fill its memory with their requests."""
    running = Call("running", [])

    async def main():
        pool, argument = WorkPool("work", 1), Call("argument", [])
        first = asyncio.create_task(pool.run(LIMIT, running))
        await until(running.entered)
        second, kept = asyncio.create_task(pool.run(LIMIT, id, argument)), weakref.ref(argument)
        await asyncio.sleep(0)  # it is in the queue
        del argument
        second.cancel()
        await asyncio.wait([second])
        del second
        gc.collect()  # its error refers to its frame
        assert kept() is None
        running.go.set()
        await first

    run(main())


def test_a_thread_is_not_lost_to_an_event_loop_that_ended():
    order: list[str] = []
    running, waiting = Call("running", order), Call("waiting", order)
    pool = WorkPool("work", 1)

    async def leave() -> None:
        tasks = [asyncio.create_task(pool.run(LIMIT, call)) for call in (running, waiting)]
        await until(running.entered)
        assert not any(task.done() for task in tasks)

    run(leave())
    running.go.set()
    assert run(pool.run(LIMIT, lambda: 7)) == 7
    assert order == ["running"]


def test_several_event_loops_share_a_pool():
    pool = WorkPool("work", 2)
    loops = [LoopThread("one"), LoopThread("two")]
    meeting = threading.Barrier(2)  # both calls at once, each awaited in its own loop
    waiting = [asyncio.run_coroutine_threadsafe(pool.run(LIMIT, meeting.wait, LIMIT), loop.loop) for loop in loops]
    assert sorted(call.result(LIMIT) for call in waiting) == [0, 1]
    for loop in loops:
        loop.close()


def test_the_process_has_one_pool_with_a_thread_for_each_core():
    assert cpu_pool() is cpu_pool()
    assert cpu_pool().size == usable_cores() == len(os.sched_getaffinity(0))


def test_a_closed_pool_refuses_what_waits_and_what_comes():
    order: list[str] = []
    running, waiting = Call("running", order), Call("waiting", order)

    async def main():
        pool = WorkPool("work", 1)
        tasks = [asyncio.create_task(pool.run(LIMIT, call)) for call in (running, waiting)]
        await until(running.entered)
        pool.close()
        running.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RuntimeError, match="the threads work are closed"):
            await pool.run(LIMIT, lambda: 1)
        return results

    result, refused = run(main())
    assert result == "running" and isinstance(refused, RuntimeError) and order == ["running"]


def test_shared_tasks_compute_once_and_forget_errors():
    shared, calls = SharedTasks(), []

    async def main():
        go = asyncio.Event()

        async def make() -> int:
            calls.append(1)
            await go.wait()
            if len(calls) == 1:
                raise OSError("gone")
            return 7

        waiting = [asyncio.create_task(shared.get("a", make)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        go.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        return [type(result).__name__ for result in results], await shared.get("a", make)

    assert run(main()) == (["CancelledError", "OSError", "OSError", "OSError"], 7)
    assert len(calls) == 2
