"""A task of a program's loop that calls `exit()` does not end the program as if it were complete."""

from __future__ import annotations

import asyncio

import pytest

from vlmrl.utils.threads import run_awake


async def exits() -> None:
    raise SystemExit(0)


async def two_tasks() -> str:
    with pytest.raises(SystemExit):
        await asyncio.gather(exits(), asyncio.sleep(0))
    return "complete"


def test_a_program_goes_on_after_a_task_that_exits():
    assert run_awake(two_tasks()) == "complete"


def test_a_program_that_exits_itself_fails():
    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        run_awake(exits())
