"""A mixture-of-experts model on a real vLLM server: it returns the experts of each token.

vLLM does so only with its second model runner, which needs Triton: here Triton's interpreter runs its kernels.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from testing.real_servers import TRIES, served
from testing.server_cases import (  # noqa: F401
    share_alike,
    test_known_experts_are_not_returned_again,
    test_the_experts_of_all_tokens_are_those_of_the_trainers_routers_before_and_after_an_update,
)
from testing.vllm_servers import gauge, vllm_config

from vlmrl.model.tiny import build

INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny Qwen3-VL-MoE in float32."""
    folder = tmp_path_factory.mktemp("experts")
    config = vllm_config(build(folder / "model", "qwen3_vl_moe"), folder)
    for [one] in served(replace(config, server=replace(config.server, env=config.server.env | INTERPRETED))):
        yield one


def test_a_response_that_an_update_interrupts_has_the_experts_of_the_new_weights_only(experts):
    """Also where its tokens are in the prefix cache, which the other response to the same question has filled."""
    requests = [experts.question(f"long/{i}", 200) for i in range(2)]
    asyncio.run(experts.run.engine.generate(experts.question("first", 4)))

    async def interrupted(seed):
        tasks = []
        async with asyncio.timeout(600):
            while await asyncio.to_thread(gauge, experts.server, "num_requests_running") < 2:
                if all(task.done() for task in tasks):
                    tasks = [asyncio.create_task(experts.run.engine.generate(request)) for request in requests]
                await asyncio.sleep(0.05)
        experts.change(seed)
        await experts.push()
        return await asyncio.gather(*tasks)

    for seed in range(2, 2 + TRIES):
        responses = asyncio.run(interrupted(seed))
        if all(len(set(response.policy_versions)) == 2 for response in responses):
            break
    for request, response in zip(requests, responses, strict=True):
        versions = np.array(response.policy_versions)
        new, old = (versions == experts.version).sum(), (versions < experts.version).sum()
        assert new and old
        known = [each is not None for each in response.expert_routing]
        assert known == [False] * (response.prompt_tokens + old) + [True] * (new - 1) + [False]
        assert share_alike(experts, experts.row_of(request, response), response.expert_routing) > 0.995
