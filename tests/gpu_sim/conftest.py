"""The simulated GPU, built once for each session of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest
from testing.gpu_sim import CannotSimulate, SimulatedGpu, build, why_no_triton


def cannot(reason: str) -> NoReturn:
    """Skip the test; fail it with VLMRL_REQUIRE_GPU_SIM, which CI sets, so that it never passes without these tests."""
    if os.environ.get("VLMRL_REQUIRE_GPU_SIM"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def simulated_gpu(tmp_path_factory) -> Iterator[SimulatedGpu]:
    """Runs scripts on simulated GPUs; the test is skipped where they cannot be built."""
    try:
        gpu = build(tmp_path_factory.mktemp("gpu_sim"))
    except CannotSimulate as reason:
        cannot(f"no simulated GPU: {reason}")
    yield gpu
    gpu.process.close()


@pytest.fixture
def triton_gpu(simulated_gpu: SimulatedGpu) -> SimulatedGpu:
    """The same where Triton can compile kernels."""
    reason = why_no_triton()
    if reason is not None:
        cannot(f"no simulated GPU for Triton: {reason}")
    return simulated_gpu
