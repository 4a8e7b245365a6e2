"""Qwen3.5, whose layers carry a state, on a real vLLM server: parity, and weights of the recurrent layers."""

from __future__ import annotations

import asyncio

import pytest
from testing.real_servers import served
from testing.vllm_servers import vllm_config

from vlmrl.families.qwen3_5 import Qwen35
from vlmrl.model.tiny import build


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """A tiny Qwen3.5 in bfloat16: vLLM's recurrence on a CPU takes nothing else, and heads of 64 or 128 numbers only."""
    folder = tmp_path_factory.mktemp("recurrent")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            patch.setitem(Qwen35.tiny_text, name, 64)
        model = build(folder / "model", "qwen3_5")
    for [one] in served(vllm_config(model, folder, dtype="bfloat16")):
        yield one


def test_server_and_trainer_agree_before_and_after_an_update_of_all_weights(recurrent):
    for name in ("before", "after"):
        played = recurrent.episodes(name)
        assert max(len(trajectory.turns) for trajectory in played) == 3
        assert recurrent.largest_difference(played) < recurrent.tolerance
        recurrent.change(1)
        asyncio.run(recurrent.push())
