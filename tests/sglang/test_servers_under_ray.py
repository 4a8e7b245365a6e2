"""Trainer ranks and real servers that Ray places: the same recipe and the same checks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from testing.episodes import wait_until
from testing.ray_runs import MEMORY_MONITOR, environment, training, until_restarted, until_trained
from testing.real_servers import servers_of

from vlmrl.report.run_log import read_rows

pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")
Nodes = pytest.importorskip("ray.cluster_utils").Cluster

TRAIN = ("-m", "vlmrl", "train")
RECIPE = """
from dataclasses import replace
from pathlib import Path

from testing.real_servers import config_of
from vlmrl.config import Optim
from vlmrl.engine.sglang.backend import CPU_ARGS, CPU_ENV

def config():
    config = config_of(Path({model!r}), Path("runs"), dtype="float32")
    args = config.server.args | CPU_ARGS | {{"max-total-tokens": 16384, "enable-memory-saver": False}}
    server = replace(config.server, args=args, env=config.server.env | CPU_ENV)
    return replace(config, name="own", optim=Optim(lr=3e-3), server=server)
"""


def test_two_ranks_train_with_a_server_that_dies_and_no_process_is_left(qwen3_vl, tmp_path):
    text, folder = RECIPE.format(model=str(qwen3_vl)), tmp_path / "runs/own"
    options = ["--cluster.ranks", "2", "--train.steps", "100000"]
    with training(tmp_path, "ray-server", *options, text=text, program=TRAIN) as run:
        begun = until_trained(run)
        (server, *_) = servers_of(folder)
        os.killpg(os.getpgid(server), signal.SIGKILL)
        rows = until_restarted(run, folder / "metrics.jsonl")
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=900)
    assert run.returncode == 143, [*begun, output]
    assert [row["failed"] for row in rows] == [0] * len(rows) and rows[-1]["engine/restarts"] == 1  # where it was
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3
    assert all(row["weight_sync/bytes"] > 0 for row in rows)
    assert servers_of(folder) == []


def test_colocated_ranks_and_servers_share_the_same_gpus(qwen3_vl, tmp_path, monkeypatch):
    """Ray believes in GPUs that do not exist: on a CPU there is no memory to release, but servers must accept the calls."""
    text, folder = RECIPE.format(model=str(qwen3_vl)), tmp_path / "runs/own"
    logs = [folder / f"servers/server-{number}.log" for number in range(2)]
    monkeypatch.setenv(MEMORY_MONITOR, "0")
    node = Nodes(initialize_head=True, head_node_args={"num_cpus": 6, "num_gpus": 2, "include_dashboard": False})
    try:
        monkeypatch.setenv("RAY_ADDRESS", node.address)
        with training(tmp_path, "ray-gpus", "--cluster.gpus", "2", text=text, program=TRAIN) as run:
            wait_until(lambda: run.poll() is not None or all(map(visible_gpus, logs)))
            gpus = [visible_gpus(log) for log in logs]
            output, _ = run.communicate(timeout=900)
    finally:
        node.shutdown()
    assert run.returncode == 0, output
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3
    retried = [row["engine/retried"] for row in rows]
    assert retried == [0, 0]  # a server without weights from its rank would be retried
    assert gpus == ["0", "1"]
    for log in logs:
        sleeps = log.read_text().count("POST /release_memory_occupation")
        wakes = log.read_text().count("POST /resume_memory_occupation")
        # Of the KV cache and of the weights: the last pause is for saving the model; then servers end.
        assert sleeps == wakes + 2 >= 4
    assert servers_of(folder) == []


def visible_gpus(log: Path) -> str:
    """CUDA_VISIBLE_DEVICES of the server that writes ``log``; empty while only the process that starts it has the log open."""
    values = (environment(process).get("CUDA_VISIBLE_DEVICES") for process in servers_of(log))
    return next(filter(None, values), "")
