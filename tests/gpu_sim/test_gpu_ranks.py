"""FSDP on several simulated GPUs: each rank takes its own, and the collectives are NCCL's."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_ranks_with_the_environment_of_torchrun_take_a_gpu_each(simulated_gpu, tmp_path):
    simulated_gpu.process.run_ranks(2, "testing.gpu_ranks_script", tmp_path, SIMULATED_CUDA_DEVICES=2)
