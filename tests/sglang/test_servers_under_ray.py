"""Trainer ranks and real servers under Ray: the same recipe and the same checks."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from testing.real_servers import config_of, servers_of

from vlmrl.config import Cluster, Optim, Train
from vlmrl.engine.sglang.backend import CPU_ARGS, CPU_ENV
from vlmrl.report.run_log import read_rows
from vlmrl.run import loop
from vlmrl.run.program import run_training

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")


def test_two_ranks_train_with_a_server_that_dies_and_no_process_is_left(qwen3_vl, tmp_path, monkeypatch):
    train = Train(steps=3, groups_per_batch=2)
    config = replace(
        config_of(qwen3_vl, tmp_path, dtype="float32"), cluster=Cluster(ranks=2), optim=Optim(lr=3e-3), train=train
    )
    push = loop.push_weights

    async def push_and_kill(run, trainer, version):
        metrics = await push(run, trainer, version)
        if version == 1:
            (server, *_) = servers_of(config.folder.absolute())
            os.killpg(os.getpgid(server), signal.SIGKILL)
        return metrics

    monkeypatch.setattr(loop, "push_weights", push_and_kill)
    run_training(config)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0, 0]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3
    assert all(row["weight_sync/bytes"] > 0 for row in rows)
    assert rows[-1]["engine/restarts"] == 1  # where it was
    assert servers_of(config.folder.absolute()) == []


def test_colocated_ranks_and_servers_share_the_same_gpus(qwen3_vl, tmp_path, monkeypatch):
    """Ray believes in GPUs that do not exist: on a CPU there is no memory to release, but servers must accept the calls."""
    config = config_of(qwen3_vl, tmp_path, dtype="float32")
    args = config.sglang.args | CPU_ARGS | {"max-total-tokens": 16384, "enable-memory-saver": False}
    sglang = replace(config.sglang, args=args, env=config.sglang.env | CPU_ENV)
    config = replace(config, sglang=sglang, cluster=Cluster(gpus=2), optim=Optim(lr=3e-3))
    logs = [config.folder.absolute() / f"servers/server-{number}.log" for number in range(2)]
    push, seen = loop.push_weights, []

    async def push_and_look(run, trainer, version):
        seen.append([visible_gpus(log) for log in logs])
        return await push(run, trainer, version)

    monkeypatch.setattr(loop, "push_weights", push_and_look)
    ray.init(address="local", num_cpus=6, num_gpus=2, include_dashboard=False)
    try:
        run_training(config)
    finally:
        ray.shutdown()
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3
    retried = [row["engine/retried"] for row in rows]
    assert retried == [0, 0]  # a server without weights from its rank would be retried
    assert seen == [["0", "1"]] * 2
    for log in logs:
        sleeps = log.read_text().count("POST /release_memory_occupation")
        wakes = log.read_text().count("POST /resume_memory_occupation")
        assert sleeps == wakes + 1 >= 3  # the last pause is for saving the model; then servers end
    assert servers_of(config.folder.absolute()) == []


def visible_gpus(log: Path) -> str:
    """CUDA_VISIBLE_DEVICES of the server that writes ``log``."""
    (server, *_) = servers_of(log)
    environment = Path(f"/proc/{server}/environ").read_text().split("\0")
    return next(line.partition("=")[2] for line in environment if line.startswith("CUDA_VISIBLE_DEVICES="))
