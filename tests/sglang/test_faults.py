"""Servers that die or hang during rollouts: the run continues, and no reply from stale weights is used."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from testing.real_servers import processes_of, versions

BEGIN = """
import asyncio, sys
from pathlib import Path
from testing.real_servers import config_of
from vlmrl.run.build import Run, build_run

run = build_run(config_of(Path(sys.argv[1]), Path(sys.argv[2])))
asyncio.run(run.engine.start())
print(run.engine.servers.all[0].process.group, flush=True)
asyncio.run(asyncio.sleep(600))
"""


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_rollouts_survive_the_death_of_their_server(qwen3, monkeypatch, blow):
    servers = qwen3.run.engine.servers
    monkeypatch.setattr(servers, "settings", replace(qwen3.run.config.sglang, health_timeout=15.0))
    qwen3.change(seed=int(blow))
    asyncio.run(qwen3.push())
    sums, restarts = qwen3.checksums(), servers.restarts

    async def kill_server():
        before = qwen3.requests()
        while qwen3.requests() < before + 4:
            await asyncio.sleep(0.02)
        os.killpg(qwen3.server.process.group, blow)

    async def play():
        killed = asyncio.create_task(kill_server())
        played = await asyncio.to_thread(qwen3.episodes, f"struck-by-{blow.name}", 8)
        await killed
        return played

    played = asyncio.run(play())
    assert servers.restarts == restarts + 1
    assert len(played) == 32
    assert versions(played) == {qwen3.version}
    assert qwen3.largest_difference(played) < qwen3.tolerance
    assert qwen3.checksums() == sums


def test_a_restarted_server_has_the_weights_that_were_sent_while_it_was_dead(qwen3):
    qwen3.change(seed=3)
    os.killpg(qwen3.server.process.group, signal.SIGKILL)
    asyncio.run(qwen3.push())
    played = qwen3.episodes("restarted")
    assert versions(played) == {qwen3.version}
    assert qwen3.largest_difference(played) < qwen3.tolerance


def test_a_run_that_is_killed_leaves_no_server(qwen3_vl, tmp_path):
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])}
    command = [sys.executable, "-c", BEGIN, str(qwen3_vl), str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        group = int(driver.stdout.readline())
        assert len(processes_of(group)) > 1
        driver.kill()
    end = time.monotonic() + 30
    while processes_of(group) and time.monotonic() < end:
        time.sleep(0.2)
    assert processes_of(group) == []
