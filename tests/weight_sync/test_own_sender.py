"""A way of sending weights from outside the package: a file, a line in the registry, and a step of training over it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from testing.fake_sglang import FakeSGLang

from vlmrl.config import Algo, Config, Data, Model, Optim, Rollout, ServerSettings, Train
from vlmrl.model import tiny
from vlmrl.report.run_log import read_rows
from vlmrl.run.program import run_training
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import NamedWeights, SenderState, TransferResult, WeightSender, WeightUpdate

pytestmark = pytest.mark.slow

MAILBOX: dict[str, FakeSGLang] = {}
"""Servers in this process by URL: their memory is where the sender puts the weights."""


@dataclass
class MailboxSender:
    update: WeightUpdate

    def send(self, weights: NamedWeights) -> TransferResult:
        named = {name: weight.detach().to(self.update.dtype, copy=True) for name, weight in weights}
        for receiver in self.update.receivers:
            MAILBOX[receiver.url].weights = named
            MAILBOX[receiver.url].version = self.update.version
        return TransferResult(sum(weight.nbytes for weight in named.values()), 0.0)

    def abort(self) -> None:
        pass


def own_sender(update: WeightUpdate, state: SenderState) -> WeightSender:
    return MailboxSender(update)


@pytest.fixture
def server(monkeypatch):
    fake = FakeSGLang()
    fake.finish = {"type": "length", "length": 3}
    monkeypatch.setitem(MAILBOX, fake.url, fake)
    monkeypatch.setitem(SENDERS, "mailbox", own_sender)
    yield fake
    fake.close()


def test_a_step_is_trained_whose_weights_reach_the_server_by_a_sender_of_ones_own(server, tmp_path):
    folder = tiny.build(tmp_path / "model", "qwen3")
    rewards = itertools.cycle([0.0, 1.0])
    config = Config(
        name="own",
        output_dir=str(tmp_path),
        model=Model(path=str(folder), device="cpu", dtype="float32"),
        data=Data(generator=lambda index, seed: {"prompt": "Say a."}, size=4),
        reward=lambda text, task: next(rewards),
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=8),
        engine="sglang",
        server=ServerSettings(urls=(server.url,), sync="mailbox", check=False),
        algo=Algo(entropy_coef=0.1),  # equal responses with opposite advantages have no other gradient
        optim=Optim(lr=1e-2),
        train=Train(steps=1, groups_per_batch=2),
    )
    run_training(config)
    [row] = [row for row in read_rows(config.folder / "metrics.jsonl") if "loss" in row]
    assert row["weight_sync/bytes"] == sum(weight.nbytes for weight in server.weights.values())
    before, after = load_file(folder / "model.safetensors"), load_file(config.folder / "model/model.safetensors")
    assert all(torch.equal(server.weights[name], weight) for name, weight in after.items())
    assert any(not torch.equal(before[name].float(), weight) for name, weight in after.items())
    assert not [path for path, _ in server.calls if path.startswith(("/update_weights", "/begin_weight"))]
