"""A task of a program's loop that calls `exit()` does not end the program as if it were complete."""

from __future__ import annotations

import asyncio

import pytest

from vlmrl.utils.threads import LoopThread, run_awake


async def exits() -> None:
    raise SystemExit(0)


async def two_tasks() -> str:
    with pytest.raises(SystemExit):
        await asyncio.gather(exits(), asyncio.sleep(0))
    return "complete"


def test_a_program_goes_on_after_a_task_that_exits():
    assert run_awake(two_tasks()) == "complete"


@pytest.mark.timeout(120)
def test_a_program_ends_beside_a_task_that_exits_in_the_same_round():
    """asyncio forgets that the loop is stopped when an error leaves it."""

    async def ends_first() -> str:
        done = asyncio.Event()

        async def exits_next() -> None:
            await done.wait()
            await asyncio.sleep(0)
            raise SystemExit(0)

        task = asyncio.create_task(exits_next())
        asyncio.get_running_loop().call_later(0.01, done.set)
        await done.wait()  # before the task waits
        return f"complete, {task.done()}"

    assert run_awake(ends_first()) == "complete, False"


@pytest.mark.timeout(120)
def test_a_thread_of_a_loop_ends_where_a_task_exits_too():
    thread, tasks = LoopThread("exits"), []

    async def exits_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(0)

    async def begin() -> None:
        tasks.append(asyncio.create_task(exits_at_the_end()))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(exits()))
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)

    thread.wait(begin())
    thread._thread.join()
    assert thread.loop.is_closed()


def test_a_program_that_exits_itself_fails():
    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        run_awake(exits())
