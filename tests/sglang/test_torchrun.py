"""Trainer ranks that `torchrun` starts, and a real server that rank 0 starts: its weights are those of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vlmrl.metrics import read_rows

SCRIPT = Path(__file__).with_name("torchrun_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_two_ranks_train_what_a_server_samples(qwen3_vl, tmp_path):
    command = [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", SCRIPT, qwen3_vl, tmp_path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(map(str, command), capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-8000:]
    assert "on 2 ranks (FSDP2)" in done.stdout
    rows = read_rows(tmp_path / qwen3_vl.name / "metrics.jsonl")
    assert [row["failed"] for row in rows] == [0, 0]
    assert max(row["rollout_gap/max"] for row in rows) < 1e-3  # of the second step: after an update
    assert all(row["weight_sync/bytes"] > 0 and row["grad_norm"] > 0 for row in rows)
