"""Adapters on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from testing.real_servers import Served, config_of, served, versions

from vlmrl.config import Lora
from vlmrl.engine.base import paused
from vlmrl.model.lora import adapters_off, named_adapters


@pytest.fixture(scope="module")
def adapted(qwen2_5_vl, tmp_path_factory):
    """A tiny Qwen2.5-VL that is trained by adapters."""
    config = config_of(qwen2_5_vl, tmp_path_factory.mktemp("adapted"))
    args = config.sglang.args | {"lora-backend": "torch_native"}
    model = replace(config.model, lora=Lora(rank=4, alpha=8))
    for [one] in served(replace(config, model=model, sglang=replace(config.sglang, args=args))):
        yield one


@dataclass
class Adapters:
    """The part of a trainer that a push of adapters uses."""

    run: object

    def named_adapters(self):
        return named_adapters(self.run.model.policy.model)


def train(adapted: Served, seed: int) -> None:
    """Change the adapters, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.run.model.policy.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


async def push(adapted: Served) -> dict[str, float]:
    version = adapted.version + 1
    async with paused(adapted.run.engine):
        metrics = await adapted.run.serving.push(Adapters(adapted.run), version)
        adapted.run.engine.weights_changed(version)
    return metrics


def test_adapters_are_sent_separately_and_used_for_sampling(adapted):
    for seed in (1, 2):
        train(adapted, seed)
        metrics = asyncio.run(push(adapted))
        played = adapted.episodes(f"lora{seed}")
        assert versions(played) == {adapted.version}
        assert adapted.largest_difference(played) < adapted.tolerance
        with adapters_off(adapted.run.model.policy.model):
            assert adapted.largest_difference(played) > 3 * adapted.tolerance  # so the adapters have an effect
    size = sum(weight.numel() for _, weight in named_adapters(adapted.run.model.policy.model))
    assert metrics["weight_sync/bytes"] < 2 * 2 * size + 50_000  # bfloat16, and the pickle's own


def test_an_interrupted_reply_keeps_its_adapter(adapted):
    version, old, request = adapted.version, adapted.weights(), adapted.question("interrupted", 300)

    async def interrupt():
        [task] = await adapted.in_flight([request], tokens=60)
        train(adapted, seed=9)
        await push(adapted)
        return await task

    completion = asyncio.run(interrupt())
    assert set(completion.policy_versions) == {version}
    adapted.set_weights(old)
    [scores] = adapted.scores([adapted.row_of(request, completion)])
    assert np.abs(scores - completion.logprobs).max() < adapted.tolerance


def test_a_restarted_server_has_the_adapter_again(adapted):
    train(adapted, seed=5)
    asyncio.run(push(adapted))
    os.killpg(adapted.server.process.group, signal.SIGKILL)
    played = adapted.episodes("restarted")
    assert versions(played) == {adapted.version}
    assert adapted.largest_difference(played) < adapted.tolerance
