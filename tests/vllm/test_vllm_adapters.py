"""Adapters on a real vLLM server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from testing.real_servers import served
from testing.server_cases import (  # noqa: F401
    push_adapters,
    test_adapters_are_sent_separately_and_used_for_sampling,
    test_responses_keep_the_adapter_that_they_began_with,
    train_adapters,
)
from testing.vllm_servers import vllm_config

from vlmrl.config import Lora


@pytest.fixture(scope="module")
def adapted(qwen3_vl, tmp_path_factory):
    """A tiny Qwen3-VL that is trained by adapters."""
    config = vllm_config(qwen3_vl, tmp_path_factory.mktemp("adapted"))
    for [one] in served(replace(config, model=replace(config.model, lora=Lora(rank=4, alpha=8)))):
        yield one


def test_only_the_last_adapter_is_left_on_the_server(adapted):
    train_adapters(adapted, 5)
    asyncio.run(push_adapters(adapted))
    engine = adapted.run.engine

    async def loaded():
        response = await engine.thread.run(engine.servers.call(adapted.server, "/v1/models"))
        return {model["id"] for model in response["data"]} - {adapted.run.model.path}

    async def until_unloaded():
        async with asyncio.timeout(600):
            while len(await loaded()) > 1:
                await asyncio.sleep(0.1)
        return await loaded()

    assert asyncio.run(until_unloaded()) == {engine.adapter}
