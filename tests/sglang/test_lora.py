"""Adapters on a real server."""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from test_real_server import GAP, episodes, gap, question, row_of, until, weights_of

from vlmrl.engine.base import paused
from vlmrl.model.adapters import adapters_off, named_adapters
from vlmrl.serving import _score


class Adapters:
    """As much of a trainer as a push of adapters asks for."""

    def __init__(self, run):
        self.run = run

    def named_adapters(self):
        return named_adapters(self.run.model.policy.model)


def train(run, seed):
    """What training would do: other adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in run.model.policy.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


async def push(run, version):
    await run.serving.push(Adapters(run), version)
    run.engine.weights_changed(version)


def test_adapters_are_sent_by_themselves_and_sampled_with(lora_run):
    run = lora_run
    for version in (1, 2):
        train(run, seed=version)
        asyncio.run(push(run, version))
        played = episodes(run, f"lora{version}")
        assert {v for t in played for turn in t.turns for v in turn.policy_versions} == {version}
        assert gap(run, played) < GAP
        with adapters_off(run.model.policy.model):
            assert gap(run, played) > 3 * GAP  # so they are seen
    sizes = [weight.numel() for _, weight in named_adapters(run.model.policy.model)]
    assert run.serving.sync.bytes < 2 * 2 * sum(sizes) + 50_000  # bfloat16, and the pickle's own


def test_an_interrupted_reply_keeps_the_adapter_it_began_with(lora_run):
    run = lora_run
    version, old = run.engine.policy_version, weights_of(run)
    request = question(run, "interrupted", 300)

    async def interrupt():
        asked = asyncio.create_task(run.engine.generate(request))
        await until(run, lambda told: told["num_used_tokens"] > 60)
        async with paused(run.engine):
            train(run, seed=9)
            await push(run, version + 1)
        return await asked

    completion = asyncio.run(interrupt())
    assert set(completion.policy_versions) == {version}
    run.model.policy.model.load_state_dict(old, strict=False)
    [scores] = _score(run.model.policy, [row_of(run, request, completion)], 1.0)
    assert np.abs(scores - completion.logprobs).max() < GAP


def test_a_restarted_server_has_the_adapter_again(lora_run):
    run = lora_run
    train(run, seed=5)
    version = run.engine.policy_version + 1
    asyncio.run(push(run, version))
    server = run.engine.servers.all[0]
    server._process.kill()
    played = episodes(run, "restarted")
    assert {v for t in played for turn in t.turns for v in turn.policy_versions} == {version}
    assert gap(run, played) < GAP
