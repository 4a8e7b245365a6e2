"""A mixture-of-experts model on a real server: it returns the experts of each token."""

from __future__ import annotations

import pytest
from testing.real_servers import config_of, served
from testing.server_cases import (  # noqa: F401
    test_known_experts_are_not_returned_again,
    test_the_experts_of_all_tokens_are_those_of_the_trainers_routers_before_and_after_an_update,
)

from vlmrl.model.tiny import build


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny Qwen3-VL-MoE in float32."""
    folder = tmp_path_factory.mktemp("experts")
    for [one] in served(config_of(build(folder / "model", "qwen3_vl_moe"), folder, dtype="float32")):
        yield one
