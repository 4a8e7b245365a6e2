"""A mixture-of-experts model on a real server: it returns the experts of each token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from testing.real_servers import Served, config_of, served

from vlmrl.model.expert_routing import indices_from_routing
from vlmrl.model.tiny import build
from vlmrl.samples import concat, step_wise
from vlmrl.train.packing import collate, count_unrecorded_experts
from vlmrl.types import Sample


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny Qwen3-VL-MoE in float32."""
    folder = tmp_path_factory.mktemp("experts")
    for [one] in served(config_of(build(folder / "model", "qwen3_vl_moe"), folder, dtype="float32")):
        yield one


def chosen_here(experts: Served, sample: Sample) -> np.ndarray:
    """Where the trainer's routers send the tokens of a row by themselves."""
    policy = experts.run.model.policy
    batch = collate([replace(sample, expert_routing=[])], policy.family)
    with torch.no_grad(), policy.routing.recorded() as layers:
        policy(batch)
    return torch.stack(layers, 1).numpy()


def test_the_experts_of_all_tokens_are_those_of_the_trainers_routers_before_and_after_an_update(experts):
    for name in ("before", "after"):
        played = experts.episodes(name)
        assert max(len(trajectory.turns) for trajectory in played) == 3
        for sample in (sample for trajectory in played for sample in (*concat(trajectory), *step_wise(trajectory))):
            assert count_unrecorded_experts([sample]) == 0
            alike = np.sort(indices_from_routing(sample.expert_routing)[:-1]) == np.sort(
                chosen_here(experts, sample)[:-1]
            )
            assert alike.mean() > 0.995  # a rounding difference may decide between two experts
        assert experts.largest_difference(played) < experts.tolerance
        experts.change(1)
        asyncio.run(experts.push())


def test_known_experts_are_not_returned_again(experts):
    request = experts.question("again", 8)
    whole = asyncio.run(experts.run.engine.generate(request))
    assert len(whole.expert_routing) == whole.prompt_tokens + len(whole.token_ids)
    known = whole.prompt_tokens - 3
    request = experts.question("again", 8, routing_from=known)
    rest = asyncio.run(experts.run.engine.generate(request))
    assert len(rest.expert_routing) == 3 + len(rest.token_ids)
    assert rest.expert_routing[:2] == whole.expert_routing[known : known + 2]
