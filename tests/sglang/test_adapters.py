"""Adapters on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from testing.real_servers import config_of, served, versions
from testing.server_cases import (  # noqa: F401
    push_adapters,
    test_adapters_are_sent_separately_and_used_for_sampling,
    test_responses_keep_the_adapter_that_they_began_with,
    train_adapters,
)

from vlmrl.config import Lora


@pytest.fixture(scope="module")
def adapted(qwen2_5_vl, tmp_path_factory):
    """A tiny Qwen2.5-VL that is trained by adapters."""
    config = config_of(qwen2_5_vl, tmp_path_factory.mktemp("adapted"))
    args = config.server.args | {"lora-backend": "torch_native"}
    model = replace(config.model, lora=Lora(rank=4, alpha=8))
    for [one] in served(replace(config, model=model, server=replace(config.server, args=args))):
        yield one


def test_a_restarted_server_has_the_adapter_again(adapted):
    train_adapters(adapted, seed=5)
    asyncio.run(push_adapters(adapted))
    os.killpg(adapted.server.process.group, signal.SIGKILL)
    played = adapted.episodes("restarted")
    assert versions(played) == {adapted.version}
    assert adapted.largest_difference(played) < adapted.tolerance
