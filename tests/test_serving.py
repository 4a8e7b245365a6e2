"""Runs that sample from SGLang servers, as far as that goes without one. With real ones: tests/sglang."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import ModuleSpec

import pytest
import torch
from safetensors.torch import load_file

from vlmrl import parts
from vlmrl.config import Cluster, Config, Data, Model, Rollout, SGLang
from vlmrl.model.adapters import named_weights
from vlmrl.model.loading import as_saved, load_model
from vlmrl.placement import Plan, Sizes

URLS = SGLang(urls=("http://127.0.0.1:9",))


def ten_tasks(index, seed):
    return {"prompt": "How many?"}


def one(text, task):
    return 1.0


def config_of(model, folder, **settings) -> Config:
    return Config(
        output_dir=str(folder),
        model=Model(path=str(model), device="cpu"),
        data=Data(generator=ten_tasks, size=10),
        reward=one,
        rollout=Rollout(max_tokens=64, max_reply_tokens=8),
        engine="sglang",
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "deterministic needs engine embedded"),
        (
            {"cluster": Cluster(ranks=2)},
            "with engine sglang leave cluster unset and start several trainer ranks by torchrun",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(engine="sglang", **settings)


def test_servers_to_start_need_sglang(qwen3_vl, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))  # as of a folder
    with pytest.raises(ValueError, match=re.escape("pip install 'vlmrl[sglang]'")):
        parts.build(config_of(qwen3_vl, tmp_path))


def test_servers_that_run_already_need_none_here_and_get_the_trainers_own_weights(qwen3_vl, tmp_path):
    run = parts.build(config_of(qwen3_vl, tmp_path, sglang=URLS))
    try:
        assert run.trainers.policy is run.model.policy and run.receive is None
        assert run.serving.plan() == "SGLang at http://127.0.0.1:9; weights by group"
        assert run.runner().loop.engine is run.engine  # one request after the other, in no waves
    finally:
        run.engine.close()


def test_weights_are_sent_under_the_names_of_checkpoints(tiny_folder):
    model = load_model(
        Model(path=str(tiny_folder), device="cpu", dtype="float32"), None, tiny_folder, seed=0
    ).policy.model
    ours = dict(as_saved(model, named_weights(model)))
    saved = load_file(tiny_folder / "model.safetensors")
    assert ours.keys() == saved.keys()
    assert all(torch.equal(weight.float(), saved[name].float()) for name, weight in ours.items())


def test_the_plan_leaves_out_the_memory_of_servers():
    config = Config(engine="sglang", sglang=URLS)
    assert Plan.of(config, Sizes(100, 100, 8), ranks=1).engine == {}
    told = Plan.of(config, Sizes(100, 100, 8), ranks=2)
    assert list(told.engine) == ["weights"]
    assert told.where == "one program on 2 ranks (FSDP2), a copy of the weights for servers beside rank 0"
