"""The conformance suite for SGLang."""

from __future__ import annotations

import pytest
from engine.conformance import CASES, name_of, run_case
from engine.server_conformance import SERVER_CASES
from testing.engine_drivers import ServerDriver


class SGLangDriver(ServerDriver):
    promises_seeds = False
    generate_path = "/generate"
    refuses_wrong_weights = False
    hang_seconds = 15.0

    async def running(self) -> int:
        [server] = self.pool.all
        [load] = (await self.engine.thread.run(self.pool.call(server, "/v1/loads")))["loads"]
        return load["num_running_reqs"] + load["num_waiting_reqs"]


@pytest.fixture(scope="module")
def driver(qwen3):
    made = SGLangDriver(qwen3.run)
    yield made
    made.use(qwen3.first)


@pytest.mark.parametrize("case", CASES + SERVER_CASES, ids=name_of)
def test_sglang_conforms(driver, case):
    run_case(driver, case)
