"""A task of an async agent that calls `exit()`, as code that a policy wrote does, ends that agent and no other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from vlmrl.config import Gateway
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agents import AgentError, Agents, AgentSpec
from vlmrl.types import Task

CLIENT = AgentClient("http://127.0.0.1:9/t/x", "sk-x")


async def tool(code: str) -> None:
    exec(code)


async def gathers() -> None:
    await asyncio.gather(tool("raise SystemExit(0)"), asyncio.sleep(0))


async def groups() -> None:
    async with asyncio.TaskGroup() as tools:
        tools.create_task(tool("raise SystemExit(0)"))


async def runs_its_loop_within_itself() -> None:
    """As nest_asyncio lets it: the outer round of the loop misses callbacks that it has counted."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop._run_once)
    for _ in range(100):
        loop.call_soon(int)
    await asyncio.sleep(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("use", "outcome"),
    [(gathers, "SystemExit: 0"), (groups, "SystemExit: 0"), (runs_its_loop_within_itself, "1.0")],
)
def test_what_ends_an_event_loop_ends_no_other_agent(tmp_path, use, outcome):
    waits, used = threading.Event(), threading.Event()

    async def agent(task, client):
        if task.id == "uses":
            await use()
            return 1.0
        waits.set()
        await asyncio.to_thread(used.wait)
        return 2.0

    async def both():
        other = asyncio.create_task(agents.run(Task("waits", []), CLIENT, "a"))
        await asyncio.to_thread(waits.wait)
        try:
            result = await agents.run(Task("uses", []), CLIENT, "b")
        except AgentError as error:
            result = error
        used.set()
        return str(result), await other

    agents = Agents(AgentSpec("a", agent), Gateway(), tmp_path)
    try:
        result, of_other = asyncio.run(both())
    finally:
        used.set()
        agents.close()
    assert outcome in result and of_other == 2.0
