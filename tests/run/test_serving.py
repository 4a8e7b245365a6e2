"""Runs with inference servers, without starting one. With real servers: tests/server."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from testing.fake_sglang import FakeSGLang

from vlmrl.config import Cluster, Config, Data, Eval, Lora, Model, Rollout, ServerSettings, Train
from vlmrl.engine import server_environment
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import ServerInfo
from vlmrl.engine.server_backend import Capabilities, ServedModel, ServerBackend
from vlmrl.engine.server_checks import check_capabilities, check_model
from vlmrl.engine.server_environment import ServerEnvironment
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.engine.vllm.backend import VLLMBackend
from vlmrl.model.loading import as_saved, load_model, load_reader
from vlmrl.model.lora import named_weights
from vlmrl.model.tiny import build
from vlmrl.plan.memory_plan import MemoryPlan, Sizes
from vlmrl.run import build as builder
from vlmrl.run import serving
from vlmrl.run.build import build_run
from vlmrl.run.serving import LocalServerHost, auto_method, sent_adapters
from vlmrl.train import controller

SIZES = Sizes(100, {"language_model": 100}, 8)
URLS = ServerSettings(urls=("http://127.0.0.1:9",))


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
        rollout=Rollout(max_tokens=64, max_response_tokens=8),
        engine="sglang",
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "deterministic needs engine embedded"),
        (
            {"cluster": Cluster(gpus=8, engines=8), "server": ServerSettings(tp=2)},
            "cluster.engines must be at most 4: each server needs server.tp (2) GPUs with ranks on one machine",
        ),
        (
            {"cluster": Cluster(gpus=8, engines=3, colocate=False), "server": ServerSettings(tp=2)},
            "cluster.engines must be at most 2: each server needs server.tp (2) GPUs without ranks on one machine",
        ),
        (
            {"cluster": Cluster(gpus=4), "server": ServerSettings(tp=8)},
            "server.tp must be at most 4, the GPUs with ranks on one machine, but it is 8",
        ),
        ({"cluster": Cluster(gpus=4, engines=1, nodes=2)}, "cluster.engines must be a multiple of cluster.nodes (2)"),
        (
            {"cluster": Cluster(gpus=4), "server": ServerSettings(sync="group")},
            "server.sync must be tensor, disk or auto",
        ),
        (
            {"cluster": Cluster(gpus=12, ranks=6, engines=3, colocate=False, nodes=2), "server": ServerSettings(tp=2)},
            "cluster.engines must be at most 2: each server needs server.tp (2) GPUs without ranks on one machine",
        ),
        ({"cluster": Cluster(ranks=2), "server": ServerSettings(first_gpu=1)}, "Ray assigns GPUs"),
    ],
)
def test_settings_that_contradict_servers_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(engine="sglang", **settings)


def test_servers_to_start_need_sglang(qwen3_vl, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))  # as for a folder
    with pytest.raises(ValueError, match=re.escape("pip install 'vlmrl[sglang]'")):
        build_run(config_of(qwen3_vl, tmp_path))


def test_external_servers_need_no_sglang_here_and_get_the_trainers_own_weights(qwen3_vl, tmp_path):
    run = build_run(config_of(qwen3_vl, tmp_path, server=URLS))
    try:
        assert run.trainer.rank.policy is run.model.policy and run.copied is None
        assert run.serving.plan() == "SGLang at http://127.0.0.1:9; weights by group"
        assert run.runner().loop.engine is run.engine  # without lockstep batching
    finally:
        run.engine.close()


class Vague(FakeSGLang):
    """It does not say which weights it has."""

    async def _model_info(self, body):
        return web.json_response({"model_path": "m"})


@pytest.mark.slow
def test_a_server_that_does_not_say_which_weights_it_has_is_an_engine_error(qwen3_vl, tmp_path):
    fake = Vague()
    run = build_run(config_of(qwen3_vl, tmp_path, server=ServerSettings(urls=(fake.url,), sync="tensor")))
    try:
        with pytest.raises(EngineError, match="did not say which weights it has loaded: KeyError: 'weight_version'"):
            asyncio.run(run.connect())
    finally:
        run.close()
        fake.close()


DECODER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NoUpdate:
    """Stands for a WeightSync that has sent nothing."""

    method, bytes, seconds = "group", 0, 0.0


class Plain(ServerBackend):
    """A server program that can do little."""

    capabilities = Capabilities(temperatures=(0.01, 2.0))
    name, title, package = "plain", "Plain", "json"
    launch = parse_info = generate = parse = abort = receiver = None  # not called


@pytest.mark.parametrize(
    ("settings", "needs", "message"),
    [
        ({}, {"expert_routing": True}, "with engine plain, train.replay_routing must be False: it returns no experts."),
        ({}, {"colocated": True}, "with engine plain, server.first_gpu must name other GPUs than the trainer's"),
        (
            {},
            {"method": "tensor"},
            "with engine plain, server.sync must be one of disk, group: it takes no tensor handles.",
        ),
        (
            {"rollout": Rollout(temperature=0), "eval": Eval(temperature=2.5)},
            {},
            "with engine plain, eval.temperature must be 0 or from 0.01 to 2, but it is 2.5.",
        ),
        (
            {"rollout": Rollout(top_p=0.5)},
            {},
            "with engine plain, rollout.top_p must be 1 and top_k 0, but they are 0.5 and 0: it returns",
        ),
    ],
)
def test_settings_that_need_a_missing_capability_are_refused(settings, needs, message):
    config = Config(engine="sglang", **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_capabilities(
            Plain(config.server), config, **({"colocated": False, "expert_routing": False, "method": "disk"} | needs)
        )


TEXT = SimpleNamespace(image_processor=None)


def test_a_model_that_the_server_program_cannot_serve_is_refused():
    sglang, vllm = SGLangBackend(ServerSettings()), VLLMBackend(ServerSettings())
    check_model(sglang, TEXT, "qwen3_vl")
    with pytest.raises(
        ValueError, match=r"engine sglang cannot serve models of the type smolvlm: .* takes .* no token ids"
    ):
        check_model(sglang, TEXT, "smolvlm")
    with pytest.raises(ValueError, match=r"engine vllm cannot serve models of the type glm46v"):
        check_model(vllm, TEXT, "glm46v")


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "glm4v"])
def test_a_limit_of_images_that_a_server_would_undo_is_refused(family, tmp_path):
    """SmolVLM's processor scales every image up to the longest edge. Those of others keep images above their minimum."""
    backend = VLLMBackend(ServerSettings())

    def reader(max_pixels):
        return load_reader(Model(path=f"tiny:{family}", max_image_pixels=max_pixels), tmp_path)

    check_model(backend, reader(None), family)
    check_model(backend, reader(256 * 256), family)
    low = reader(130 * 130)
    change = "images of 128x128 pixels to 256x256"
    if family != "smolvlm":
        check_model(backend, low, family)
        low.image_processor.size["shortest_edge"] = 200 * 200
        change = ".*"
    with pytest.raises(
        ValueError, match=rf"vllm .* but it is 16900: .* would scale {change}. Lower .*/preprocessor_config.json"
    ):
        check_model(backend, low, family)


@pytest.mark.parametrize(
    ("family", "lora", "sent"),
    [
        ("qwen3_vl", {}, DECODER),
        ("qwen3_vl", {"vision": True}, None),
        ("qwen2_5_vl", {"targets": ("up_proj",)}, ("up_proj",)),
        (
            "qwen2_5_vl",
            {"targets": ("up_proj",), "vision": True},
            None,
        ),  # its vision tower has layers of this name, too
        ("qwen3", {}, DECODER),
        ("qwen3_5", {}, None),  # SGLang loads no adapters of its linear attention
    ],
)
def test_adapters_that_servers_cannot_load_are_merged(family, lora, sent, tmp_path):
    """The server gets the names of the layers that have adapters, which the settings may leave to the model."""
    config = config_of(build(tmp_path / "model", family), tmp_path, server=URLS)
    run = build_run(replace(config, model=replace(config.model, lora=Lora(rank=4, **lora))))
    run.engine.close()
    assert run.serving.adapters == (Lora(rank=4, targets=sent) if sent else None)
    assert run.serving.plan().endswith("; adapters" if sent else "; weights by group")
    assert sent_adapters(Lora(rank=4), DECODER, Plain(ServerSettings())) is None


def test_the_servers_are_told_which_layers_have_adapters(qwen3_vl, tmp_path):
    """Also where `model.freeze` leaves none of a kind."""
    config = config_of(qwen3_vl, tmp_path, server=URLS)
    model = replace(config.model, lora=Lora(rank=4, alpha=8), freeze=("*.mlp.*", "*.layers.0.*"))
    run = build_run(replace(config, model=model))
    sent = []

    class Sync(NoUpdate):
        async def push_adapter(self, weights, settings, policy_version):
            sent.append((weights, settings, policy_version))

    run.serving.sync = Sync()
    asyncio.run(run.serving.push(3))
    run.engine.close()
    [(weights, settings, version)] = sent
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert settings == {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": attention}
    assert (
        version == 3
        and len(weights) == 3 * 4 * 2
        and all(f".{layer}." not in str(weights.keys()) for layer in ("mlp", "layers.0"))
    )


class HandlesOnly(Plain):
    capabilities = Capabilities(tensor_handles=True)


@pytest.mark.parametrize(
    ("backend", "host", "method"),
    [
        (HandlesOnly, {"method": "tensor", "colocated": False}, "tensor"),
        (HandlesOnly, {"method": "group", "colocated": False}, "group"),
        (Plain, {"method": "tensor", "colocated": False}, "group"),
        (Plain, {"method": "tensor", "colocated": True}, "disk"),  # NCCL needs GPUs of its own
        (Plain, {"method": "group", "colocated": False}, "group"),
    ],
)
def test_weights_are_sent_in_a_way_that_the_server_program_takes(backend, host, method):
    backend = backend(ServerSettings())
    assert auto_method(backend, SimpleNamespace(**host)) == method
    check_capabilities(backend, Config(engine="sglang"), method=method, colocated=False, expert_routing=False)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def test_weights_are_sent_and_saved_under_the_names_and_in_the_form_of_checkpoints(family, tmp_path):
    folder = build(tmp_path / "model", family)
    saved = load_file(folder / "model.safetensors")
    model = load_model(Model(path=str(folder), device="cpu", dtype="float32"), tmp_path, seed=0)
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
    config = Config(engine="sglang", server=URLS)
    assert MemoryPlan.of(config, SIZES, ranks=1).engine == {}
    plan = MemoryPlan.of(config, SIZES, ranks=2)
    assert plan.engine == {} and plan.where == "one program on 2 ranks (FSDP2), servers beside rank 0"
    external = MemoryPlan.of(Config(engine="sglang", cluster=Cluster(gpus=4), server=URLS), SIZES, ranks=1)
    assert external.where == "4 trainer ranks (FSDP2) on 4 GPUs of 1 node, beside servers that run already"
    placed = MemoryPlan.of(Config(engine="sglang", cluster=Cluster(gpus=4)), SIZES, ranks=1)
    assert placed.where == "4 trainer ranks (FSDP2) and 4 SGLang servers on 4 GPUs of 1 node, colocated"
    assert placed.engine == {}


@pytest.mark.parametrize(
    ("sync", "device", "nccl", "method"),
    [
        ("auto", "cuda", "2.29.7", "disk"),
        ("auto", "cuda", "2.30.7", "group"),
        ("auto", "cuda", None, "group"),  # unknown
        ("auto", "cpu", "2.29.7", "group"),  # by gloo
        ("group", "cuda", "2.29.7", "server.sync must not be group"),
    ],
)
def test_servers_with_another_nccl_get_their_weights_by_disk(
    qwen3_vl, tmp_path, monkeypatch, caplog, sync, device, nccl, method
):
    monkeypatch.setattr(
        server_environment, "environment_of", lambda python: ServerEnvironment("2.30.7", "nvidia-nccl-cu13")
    )
    run = build_run(config_of(qwen3_vl, tmp_path, server=replace(URLS, sync=sync)))
    run.engine.servers.all[0].info = ServerInfo(device=device, nccl=nccl)
    what = f"trainer has NCCL 2.30.7, and the servers {nccl} at http://127.0.0.1:9"
    install = "`PYTHON -m pip install nvidia-nccl-cu13==2.30.7`"
    if sync == "group":
        with pytest.raises(ValueError, match=rf"{method}: the {what}"):
            run.serving._check_nccl()
    else:
        run.serving._check_nccl()
        assert run.serving.sync.method == method
        assert (what in caplog.text and install in caplog.text) == (method == "disk")
    run.engine.close()


def test_a_misspelled_way_to_send_weights_is_an_error_before_any_server_starts(tmp_path):
    config = config_of("tiny:qwen3", tmp_path, server=ServerSettings(urls=URLS.urls, sync="ncl"))
    with pytest.raises(ValueError, match=r"server\.sync must be one of auto, disk, group, tensor, but it is 'ncl'"):
        build_run(config)


@pytest.mark.parametrize(
    ("trainer", "ranks", "servers", "shares", "colocated"),
    [
        (0, 1, {}, True, True),
        (1, 1, {}, False, False),
        (0, 1, {"first_gpu": 1}, False, False),
        (3, 1, {"first_gpu": 2, "tp": 2}, True, True),
        (0, 4, {}, True, False),  # torchrun: the ranks' GPUs are 0 to 3
        (0, 4, {"first_gpu": 3}, True, False),
        (0, 4, {"first_gpu": 4}, False, False),
        (0, 1, {"urls": URLS.urls}, False, False),
    ],
)
def test_a_server_shares_a_gpu_with_a_rank_on_the_same_index(trainer, ranks, servers, shares, colocated, tmp_path):
    host = LocalServerHost(ServerSettings(**servers), tmp_path, torch.device("cuda", trainer), ranks)
    assert (host.shares_gpus, host.colocated) == (shares, colocated)


def test_the_second_server_shares_the_gpu_of_a_trainer_on_index_1(tmp_path):
    assert LocalServerHost(ServerSettings(), tmp_path, torch.device("cuda", 1), ranks=1, count=2).colocated


def test_the_ranks_of_other_machines_have_no_gpus_here(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    host = LocalServerHost(ServerSettings(first_gpu=2), tmp_path, torch.device("cuda", 0), ranks=4)
    assert not host.shares_gpus


def test_servers_need_as_many_gpus_as_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = ServerSettings(tp=2, first_gpu=1)
    host = LocalServerHost(settings, tmp_path, torch.device("cuda", 0), ranks=1, count=2)
    with pytest.raises(
        ValueError,
        match=re.escape("server.first_gpu must leave room for cluster.engines x server.tp = 4 GPUs of the 4"),
    ):
        host.servers(SGLangBackend(settings), ServedModel("/m", "bfloat16"))


@pytest.mark.parametrize("args", [{}, {"mem_fraction_static": 0.3}])
def test_a_server_beside_a_trainer_that_stays_is_refused_unless_its_memory_is_set(
    qwen3_vl, tmp_path, monkeypatch, args
):
    class Host(LocalServerHost):
        shares_gpus, colocated = True, True

    monkeypatch.setattr(builder, "LocalServerHost", Host)
    train = Train(max_staleness=1)
    config = config_of(qwen3_vl, tmp_path, server=ServerSettings(python="python", args=args), train=train)
    if args:
        build_run(config).engine.close()
        return
    message = (
        r"server.first_gpu must name GPUs without a trainer rank, but it is 0: .*set mem-fraction-static in server.args"
    )
    with pytest.raises(ValueError, match=message):
        build_run(config)


def test_a_colocated_server_gets_the_share_of_the_gpu_that_the_plan_gives(qwen3_vl, tmp_path, monkeypatch):
    asked = []

    class Host(LocalServerHost):
        shares_gpus, colocated = True, True

    def fraction(config, sizes, gpu_bytes):
        asked.append((sizes.parameters > 0, gpu_bytes))
        return 0.6257

    monkeypatch.setattr(builder, "LocalServerHost", Host)
    monkeypatch.setattr(controller, "gpu_bytes", lambda device: 80e9)
    monkeypatch.setattr(serving, "server_memory_fraction", fraction)
    run = build_run(config_of(qwen3_vl, tmp_path, server=ServerSettings(python="python")))
    run.engine.close()
    assert asked == [(True, 80e9)]
    launch = run.serving.engine.servers.all[0].process.launch
    assert "--mem-fraction-static 0.625" in " ".join(launch.command) and run.colocated


def test_a_share_that_the_settings_contain_is_taken_where_the_plan_has_none(qwen3_vl, tmp_path, monkeypatch):
    class Host(LocalServerHost):
        shares_gpus, colocated = True, True

    monkeypatch.setattr(builder, "LocalServerHost", Host)
    monkeypatch.setattr(controller, "gpu_bytes", lambda device: 4e9)  # the plan refuses a GPU of this size
    with pytest.raises(ValueError, match="a server on a GPU of"):
        build_run(config_of(qwen3_vl, tmp_path, server=ServerSettings(python="python")))
    run = build_run(
        config_of(qwen3_vl, tmp_path, server=ServerSettings(python="python", args={"mem_fraction_static": 0.3}))
    )
    run.engine.close()
    assert "--mem-fraction-static 0.3" in " ".join(run.serving.engine.servers.all[0].process.launch.command)
