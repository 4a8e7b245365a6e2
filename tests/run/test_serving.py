"""Runs that sample from SGLang servers, as far as that goes without one. With real ones: tests/sglang."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import ModuleSpec

import pytest
import torch
from safetensors.torch import load_file

from vlmrl.config import Cluster, Config, Data, Model, Rollout, SGLang
from vlmrl.model.loading import as_saved, load_model
from vlmrl.model.lora import named_weights
from vlmrl.model.tiny import build
from vlmrl.run.build import build_run
from vlmrl.run.memory_plan import Plan, Sizes

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
            {"cluster": Cluster(gpus=8, engines=8), "sglang": SGLang(tp=2)},
            "cluster.engines must be at most 4: for more there are not sglang.tp (2) GPUs each on one machine, of the ranks'",
        ),
        (
            {"cluster": Cluster(gpus=8, engines=3, colocate=False), "sglang": SGLang(tp=2)},
            "cluster.engines must be at most 2: for more there are not sglang.tp (2) GPUs each on one machine, beside the ranks'",
        ),
        (
            {"cluster": Cluster(gpus=4), "sglang": SGLang(tp=8)},
            "sglang.tp must be at most 4, the GPUs of one machine of the ranks', but it is 8",
        ),
        ({"cluster": Cluster(gpus=4, engines=1, nodes=2)}, "cluster.engines must be a multiple of cluster.nodes (2)"),
        ({"cluster": Cluster(gpus=4), "sglang": SGLang(sync="group")}, "sglang.sync must be tensor, disk or auto"),
        (
            {"cluster": Cluster(gpus=12, ranks=6, engines=3, colocate=False, nodes=2), "sglang": SGLang(tp=2)},
            "cluster.engines must be at most 2: for more there are not sglang.tp (2) GPUs each on one machine",
        ),
        ({"cluster": Cluster(ranks=2), "sglang": SGLang(servers=2)}, "cluster.engines counts servers"),
        ({"cluster": Cluster(ranks=2), "sglang": SGLang(first_gpu=1)}, "Ray gives out GPUs"),
    ],
)
def test_what_servers_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(engine="sglang", **settings)


def test_servers_to_start_need_sglang(qwen3_vl, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))  # as of a folder
    with pytest.raises(ValueError, match=re.escape("pip install 'vlmrl[sglang]'")):
        build_run(config_of(qwen3_vl, tmp_path))


def test_servers_that_run_already_need_none_here_and_get_the_trainers_own_weights(qwen3_vl, tmp_path):
    run = build_run(config_of(qwen3_vl, tmp_path, sglang=URLS))
    try:
        assert run.trainers.policy is run.model.policy and run.receive is None
        assert run.serving.plan() == "SGLang at http://127.0.0.1:9; weights by group"
        assert run.runner().loop.engine is run.engine  # one request after the other, in no waves
    finally:
        run.engine.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def test_weights_are_sent_and_saved_under_the_names_and_in_the_form_of_checkpoints(family, tmp_path):
    folder = build(tmp_path / "model", family)
    saved = load_file(folder / "model.safetensors")
    model = load_model(Model(path=str(folder), device="cpu", dtype="float32"), None, tmp_path, seed=0)
    ours = dict(as_saved(model.policy.model, named_weights(model.policy.model)))
    model.save(tmp_path / "again")
    for weights in (ours, load_file(tmp_path / "again/model.safetensors")):
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weight.float(), saved[name].float()) for name, weight in weights.items())


def test_experts_are_in_the_form_of_the_hubs_checkpoints(tmp_path):
    weights = load_file(build(tmp_path, "qwen3_vl_moe") / "model.safetensors")
    experts = "model.language_model.layers.0.mlp.experts"
    assert weights[f"{experts}.gate_up_proj"].shape == (8, 128, 2 * 96)  # as Qwen3-VL-30B-A3B's [128, 2048, 2 * 768]
    assert weights[f"{experts}.down_proj"].shape == (8, 96, 128)


def test_the_plan_leaves_out_the_memory_of_servers():
    config = Config(engine="sglang", sglang=URLS)
    assert Plan.of(config, Sizes(100, 100, 8), ranks=1).engine == {}
    told = Plan.of(config, Sizes(100, 100, 8), ranks=2)
    assert list(told.engine) == ["weights"]
    assert told.where == "one program on 2 ranks (FSDP2), a copy of the weights for servers beside rank 0"
    attached = Plan.of(Config(engine="sglang", cluster=Cluster(gpus=4), sglang=URLS), Sizes(100, 100, 8), ranks=1)
    assert attached.where == "4 trainer ranks (FSDP2) on 4 GPUs of 1 node, beside servers that run already"
    placed = Plan.of(Config(engine="sglang", cluster=Cluster(gpus=4)), Sizes(100, 100, 8), ranks=1)
    assert placed.where == "4 trainer ranks (FSDP2) and 4 sglang servers on 4 GPUs of 1 node, taking turns"
    assert placed.engine == {}
