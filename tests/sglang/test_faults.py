"""Servers that die and hang in the midst of rollouts: the run goes on, and nothing stale is ever sampled."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from test_real_server import GAP, change, episodes, gap

from vlmrl.engine.base import paused


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_rollouts_outlive_their_server(qwen3_run, monkeypatch, blow):
    run = qwen3_run
    monkeypatch.setattr(run.engine.servers, "config", replace(run.config.sglang, health_timeout=15.0))
    servers, server = run.engine.servers, run.engine.servers.all[0]
    change(run, seed=int(blow))
    version = run.engine.policy_version + 1

    async def push():
        async with paused(run.engine):
            await run.serving.sync.push(run.serving._send, version)
            run.engine.weights_changed(version)

    asyncio.run(push())
    sums = asyncio.run(run.serving.sync.checksums())
    restarts = servers.restarts

    async def play():
        task = asyncio.create_task(strike())
        played = await asyncio.to_thread(episodes, run, f"struck-by-{blow.name}", 8)
        await task
        return played

    async def strike():
        before = server.launch.log.read_text().count("POST /generate")
        while server.launch.log.read_text().count("POST /generate") < before + 4:
            await asyncio.sleep(0.02)
        os.killpg(server._process.pid, blow)

    played = asyncio.run(play())
    assert servers.restarts == restarts + 1
    assert len(played) == 32
    assert {v for t in played for turn in t.turns for v in turn.policy_versions} == {version}
    assert gap(run, played) < GAP
    assert asyncio.run(run.serving.sync.checksums()) == sums
