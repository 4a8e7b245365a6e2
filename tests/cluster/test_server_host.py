"""Trainer ranks under Ray that send their weights to a server which runs already: a fake one, in this process."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file
from testing.fake_sglang import FakeSGLang

from vlmrl.config import Algo, Cluster, Config, Data, Model, Optim, Rollout, SGLang, Train
from vlmrl.model import tiny
from vlmrl.run.program import run_training

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="needs Ray: pip install 'vlmrl[ray]'")


@pytest.fixture
def server():
    fake = FakeSGLang()
    fake.finish = {"type": "length", "length": 3}
    yield fake
    fake.close()


def test_a_server_has_the_weights_of_two_ranks_after_a_step(server, tmp_path):
    folder = tiny.build(tmp_path / "model", "qwen3")
    rewards = itertools.cycle([0.0, 1.0])
    config = Config(
        name="ranks",
        output_dir=str(tmp_path),
        model=Model(path=str(folder), dtype="float32"),
        data=Data(generator=lambda index, seed: {"prompt": "Say a."}, size=4),
        reward=lambda text, task: next(rewards),
        rollout=Rollout(group_size=2, max_tokens=64, max_reply_tokens=8),
        engine="sglang",
        sglang=SGLang(urls=(server.url,), sync="tensor", check=False),
        cluster=Cluster(ranks=2),
        algo=Algo(entropy_coef=0.1),  # equal replies with opposite advantages have no other gradient
        optim=Optim(lr=1e-2),
        train=Train(steps=1, groups_per_batch=2),
    )
    run_training(config)
    saved = load_file(config.folder / "model/model.safetensors")
    assert all(torch.equal(server.weights[name], weight) for name, weight in saved.items())
    updates = [path for path, _ in server.calls if "weight" in path]
    assert updates == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"] * 2
