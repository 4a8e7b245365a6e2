"""Servers that die and hang in the midst of rollouts: the run goes on, and nothing stale is ever sampled."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from real_servers import versions


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_rollouts_outlive_their_server(qwen3, monkeypatch, blow):
    servers = qwen3.run.engine.servers
    monkeypatch.setattr(servers, "config", replace(qwen3.run.config.sglang, health_timeout=15.0))
    qwen3.change(seed=int(blow))
    asyncio.run(qwen3.push())
    sums, restarts = qwen3.checksums(), servers.restarts

    async def strike():
        before = qwen3.requests()
        while qwen3.requests() < before + 4:
            await asyncio.sleep(0.02)
        os.killpg(qwen3.server.process_group, blow)

    async def play():
        struck = asyncio.create_task(strike())
        played = await asyncio.to_thread(qwen3.episodes, f"struck-by-{blow.name}", 8)
        await struck
        return played

    played = asyncio.run(play())
    assert servers.restarts == restarts + 1
    assert len(played) == 32
    assert versions(played) == {qwen3.version}
    assert qwen3.gap(played) < qwen3.tolerance
    assert qwen3.checksums() == sums


def test_weights_that_came_while_the_server_was_dead_are_those_it_serves(qwen3):
    qwen3.change(seed=3)
    os.killpg(qwen3.server.process_group, signal.SIGKILL)
    asyncio.run(qwen3.push())
    played = qwen3.episodes("reborn")
    assert versions(played) == {qwen3.version}
    assert qwen3.gap(played) < qwen3.tolerance
