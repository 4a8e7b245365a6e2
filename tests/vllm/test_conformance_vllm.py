"""The conformance suite for vLLM."""

from __future__ import annotations

import asyncio

import pytest
from engine.conformance import CASES, name_of, run_case
from engine.server_conformance import SERVER_CASES
from testing.engine_drivers import ServerDriver
from testing.vllm_servers import gauge


class VLLMDriver(ServerDriver):
    generate_path = "/inference/v1/generate"
    filters = False
    hang_seconds = 15.0
    promises_seeds = False  # on a CPU

    async def running(self) -> int:
        server = self.pool.all[0]
        names = ("num_requests_running", "num_requests_waiting")
        return int(sum([await asyncio.to_thread(gauge, server, name) for name in names]))


@pytest.fixture(scope="module")
def driver(qwen3):
    made = VLLMDriver(qwen3.run)
    yield made
    made.use(qwen3.first)


@pytest.mark.parametrize("case", CASES + SERVER_CASES, ids=name_of)
def test_vllm_conforms(driver, case):
    run_case(driver, case)
