"""Weight updates of a real vLLM server: what they change, what they forget, and what happens when they fail midway."""

from __future__ import annotations

import asyncio

import pytest
import torch

from vlmrl.engine.base import EngineError
from vlmrl.engine.vllm.receiver import VLLMReceiver
from vlmrl.weight_sync.base import Bucket


def test_an_update_that_is_cut_off_is_sent_again_without_a_restart(qwen3, monkeypatch):
    """A part of some layers has arrived; the server must not serve until it has all of the new weights."""
    receive, cut = VLLMReceiver.receive, []

    def receive_half(self, bucket, version):
        if cut:
            return receive(self, bucket, version)
        half = len(bucket.names) // 2
        size = sum(shape.numel() for shape in bucket.shapes[:half])
        receive(self, Bucket(bucket.names[:half], bucket.shapes[:half], bucket.flat[:size]), None)
        cut.append(half)
        raise ConnectionResetError("cut off by the test")

    monkeypatch.setattr(VLLMReceiver, "receive", receive_half)
    restarts = qwen3.run.engine.servers.restarts
    qwen3.change(seed=21)
    asyncio.run(qwen3.push())
    played = qwen3.episodes("cut")
    assert cut and {version for t in played for turn in t.turns for version in turn.policy_versions} == {qwen3.version}
    assert qwen3.largest_difference(played) < qwen3.tolerance
    assert qwen3.run.engine.servers.restarts == restarts


def test_weights_that_the_model_does_not_have_are_refused_and_the_next_update_is_whole(qwen3):
    unknown = [("model.language_model.layers.0.unknown.weight", torch.zeros(2))]
    with pytest.raises(EngineError, match=r"refused the weights.*unknown"):
        asyncio.run(qwen3.sync.push(lambda update: update.send(unknown), qwen3.version))
    qwen3.change(seed=22)
    asyncio.run(qwen3.push())
    assert qwen3.largest_difference(qwen3.episodes("whole", groups=1)) < qwen3.tolerance


def test_a_server_says_whether_it_has_the_weights_of_its_folder(qwen3):
    asyncio.run(qwen3.push())
    assert asyncio.run(qwen3.run.serving._have_same_weights()) is False
