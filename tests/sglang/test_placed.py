"""Trainer ranks and a real server that Ray places: the same recipe, and the same checks."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from real_servers import config_of, servers_of

from vlmrl import loop
from vlmrl.config import Cluster, Optim, Train
from vlmrl.metrics import read_rows
from vlmrl.run import run_training

pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")


def test_two_ranks_train_what_a_server_samples_also_when_it_dies_and_leave_nothing_behind(
    qwen3_vl, tmp_path, monkeypatch
):
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
    run_training(config, Path.cwd())
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0, 0]
    assert max(row["rollout_gap/max"] for row in rows) < 1e-3
    assert all(row["weight_sync/bytes"] > 0 for row in rows)
    assert rows[-1]["engine/restarts"] == 1  # where it was
    assert servers_of(config.folder.absolute()) == []
