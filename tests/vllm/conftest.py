"""Real vLLM servers on the CPU, with tiny models: one per model, started for the first test that uses it, and shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.server_suite import both, family, glm, mark, qwen2_5, qwen3  # noqa: F401
from testing.vllm_servers import vllm_config


def pytest_collection_modifyitems(items):
    mark(items, Path(__file__).parent, "vllm", "vLLM")


@pytest.fixture(scope="session")
def program():
    return vllm_config
