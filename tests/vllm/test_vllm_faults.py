"""A vLLM server that dies in part: the run continues."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from testing.real_servers import processes_of, versions

from vlmrl.engine import server_engine
from vlmrl.engine.server_pool import Limits


def engine_core(group: int) -> int:
    """The process of the server's group that samples."""
    titles = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in processes_of(group)}
    return next(each for each, title in titles.items() if b"EngineCore" in title)


def test_a_server_whose_engine_process_has_died_is_restarted_and_gets_the_weights(qwen3, monkeypatch):
    """Its other process may hold calls until their time limit, and answer health checks with an error, or not at all."""
    monkeypatch.setattr(server_engine, "PAUSE_SECONDS", 30.0)
    monkeypatch.setattr(qwen3.run.engine.servers, "limits", Limits(health_every=0.5, health_timeout=15.0))
    restarts = qwen3.run.engine.servers.restarts
    qwen3.change(seed=3)
    os.kill(engine_core(qwen3.server.process.group), signal.SIGKILL)
    asyncio.run(qwen3.push())
    played = qwen3.episodes("restarted")
    assert versions(played) == {qwen3.version}
    assert qwen3.largest_difference(played) < qwen3.tolerance
    assert qwen3.run.engine.servers.restarts > restarts
