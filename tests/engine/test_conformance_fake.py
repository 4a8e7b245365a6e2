"""The conformance suite for a server program that vlmrl does not know, with a protocol of its own."""

from __future__ import annotations

import asyncio

import pytest
from engine.conformance import CASES, a_closed_engine_answers_nobody_and_lets_nobody_wait, name_of, run_case
from engine.server_conformance import SERVER_CASES
from testing.engine_drivers import PolicyServerDriver, policy_config

from vlmrl.run.build import build_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def driver(qwen3_vl, tmp_path_factory):
    run = build_run(policy_config(qwen3_vl, tmp_path_factory.mktemp("runs")))
    try:
        asyncio.run(run.connect())
        yield PolicyServerDriver(run)
    finally:
        run.close()


@pytest.mark.parametrize(
    "case", [*CASES, *SERVER_CASES, a_closed_engine_answers_nobody_and_lets_nobody_wait], ids=name_of
)
def test_a_server_program_from_outside_conforms(driver, case):
    run_case(driver, case)
