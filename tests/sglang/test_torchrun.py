"""Trainer ranks under `torchrun`, and a real server that rank 0 starts and updates with the weights of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testing.episodes import wait_until
from testing.real_servers import servers_of

from vlmrl.report.run_log import read_rows

SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_two_ranks_train_what_a_server_samples(qwen3_vl, tmp_path):
    command = [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", SCRIPT, qwen3_vl, tmp_path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])}
    ranks = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        output, _ = ranks.communicate(timeout=600)
    finally:
        ranks.terminate()  # torchrun forwards the signal, and rank 0 ends its server
        ranks.wait(timeout=60)
    assert ranks.returncode == 0, output[-8000:]
    assert "on 2 ranks (FSDP2)" in output
    folder = tmp_path / qwen3_vl.name
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0]
    assert max(row["logprob_mismatch/max"] for row in rows) < 1e-3  # of the second step: after an update
    assert all(row["weight_sync/bytes"] > 0 and row["grad_norm"] > 0 for row in rows)
    wait_until(lambda: servers_of(folder.absolute()) == [])
