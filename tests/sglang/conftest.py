"""Real SGLang servers on the CPU, with tiny models: one per model, started for the first test that uses it, and shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing.real_servers import config_of
from testing.server_suite import both, family, glm, mark, qwen2_5, qwen3  # noqa: F401


def pytest_collection_modifyitems(items):
    mark(items, Path(__file__).parent, "sglang", "SGLang")


@pytest.fixture(scope="session")
def program():
    return config_of
