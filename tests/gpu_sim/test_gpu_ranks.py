"""FSDP on several simulated GPUs: each rank takes its own, and the collectives are NCCL's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "ranks_script.py"


def test_ranks_under_torchrun_take_a_gpu_each(simulated_gpu, tmp_path):
    start = f"""
import subprocess, sys
launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
sys.exit(subprocess.run([{sys.executable!r}, *launch, {str(SCRIPT)!r}, {str(tmp_path)!r}]).returncode)
"""
    simulated_gpu.run(start, devices=2)
