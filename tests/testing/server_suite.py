"""What the suites of all real server programs share: their fixtures. Their tests are in `server_cases.py`.

A suite has a fixture ``program``, which makes a config from a model's folder and a folder for runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.real_servers import Served, served
from vlmrl.engine.server_checks import is_installed
from vlmrl.model import tiny


def mark(items: list[pytest.Item], folder: Path, program: str, title: str) -> None:
    """Tests in ``folder`` are slow, as they restart servers, and are skipped where the program is not installed.

    Those that use ``both`` come last: their servers live until the end, and no more than three servers live at once.
    """
    items.sort(key=lambda item: "both" in getattr(item, "fixturenames", ()))
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if not is_installed(program):
                reason = f"needs {title}: make test-{program} has an environment with it"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def both(program: Any, qwen3_vl: Path, qwen2_5_vl: Path, tmp_path_factory: Any) -> Iterator[list[Served]]:
    """Two servers, started at the same time: a starting server keeps little more than one core busy."""
    folder = tmp_path_factory.mktemp("both")
    yield from served(program(qwen3_vl, folder, dtype="float32"), program(qwen2_5_vl, folder, dtype="bfloat16"))


@pytest.fixture(scope="session")
def qwen3(both: Any) -> Any:
    """A tiny Qwen3-VL in float32."""
    return both[0]


@pytest.fixture(scope="session")
def qwen2_5(both: Any) -> Any:
    """A tiny Qwen2.5-VL in bfloat16."""
    return both[1]


@pytest.fixture(params=["qwen3", "qwen2_5"])
def family(request: pytest.FixtureRequest) -> Any:
    """Each of both in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def glm(program: Any, tmp_path_factory: Any) -> Iterator[Served]:
    """A tiny GLM-4.1V in float32."""
    folder = tmp_path_factory.mktemp("glm")
    model = tiny.build(folder / "glm4v", "glm4v")
    for [one] in served(program(model, folder, dtype="float32", start_timeout=900.0)):
        yield one
