"""vLLM's command line, requests and responses, without a server."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import signal
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from testing.episodes import wait_until
from testing.real_servers import left_of, processes_of

from vlmrl.config import Lora, ServerSettings
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.image_files import EncodedImage
from vlmrl.engine.server import TOKEN_VARIABLE, LocalProcess, ServerInfo
from vlmrl.engine.server_backend import Attempt, ServedModel
from vlmrl.engine.server_response import UNKNOWN_EXPERT, BadResponse
from vlmrl.engine.vllm.backend import ON_SERVER, VLLMBackend

END = 258
PAD = 7
FILE = EncodedImage(b'"/dev/shm/x/0.ppm"', "a" * 64)
DATA = EncodedImage(b'"data:image/png;base64,AAAA"', "b" * 64)
MODEL = ServedModel("/models/m", "bfloat16")


def attempt(**settings) -> Attempt:
    request = Request("t", [1, PAD, 2], [], SamplingParams(8, 0.5, seed=3, stop=("</a>",)))
    usual = {"request": request, "images": [], "adapter": None, "stop_ids": frozenset({END}), "banned_ids": [PAD]}
    return Attempt(**({"id": "x1", "expert_routing": False, "device": "cuda"} | usual | settings))


def body(made: Attempt) -> dict:
    call = VLLMBackend(ServerSettings()).generate(made)
    assert call.path == "/inference/v1/generate"
    return json.loads(b"".join(call.body.parts))


def test_a_server_on_a_cpu_gets_no_seed():
    assert "seed" not in body(attempt(device="cpu"))["sampling_params"]


def test_a_request_holds_unexpanded_ids_the_ban_and_our_stop_ids_alone():
    assert body(attempt()) == {
        "request_id": "x1",
        "token_ids": [1, PAD, 2],
        "sampling_params": {
            "max_tokens": 8,
            "temperature": 0.5,
            "seed": 3,
            "stop": ["</a>"],
            "stop_token_ids": [END],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "logit_bias": {str(PAD): -1e9},
        },
    }


def test_images_are_files_or_data_each_with_its_hash():
    assert body(attempt(images=[FILE, DATA], adapter="run.4")) == body(attempt()) | {
        "model": "run.4",
        "content_parts": [
            {"type": "image_url", "uuid": "a" * 64, "url": "file:///dev/shm/x/0.ppm"},
            {"type": "image_url", "uuid": "b" * 64, "url": "data:image/png;base64,AAAA"},
        ],
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0.005}, "temperature must be 0 or from 0.01 to 2, but it is 0.005"),
        ({"temperature": 2.5}, "temperature must be 0 or from 0.01 to 2, but it is 2.5"),
        ({"top_p": 0.9}, "top_p must be 1 and top_k 0, but they are 0.9 and 0"),
        ({"top_k": 20}, "top_p must be 1 and top_k 0, but they are 1 and 20"),
    ],
)
def test_sampling_whose_logprobs_vllm_cannot_report_is_refused(params, message):
    assert VLLMBackend.capabilities.refusal(SamplingParams(8, **params)).startswith(message)
    assert not VLLMBackend.capabilities.refusal(SamplingParams(8, temperature=0))


def test_an_aborted_request_is_named_as_vllm_names_it():
    call = VLLMBackend(ServerSettings()).abort("x1")
    assert call == ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-x1"]})


def response(**choice) -> dict:
    tokens = [{"token_id": 5, "logprob": -0.25}, {"token_id": END, "logprob": -0.5}]
    usual = {"finish_reason": "stop", "stop_reason": END, "token_ids": [5, END], "logprobs": {"content": tokens}}
    versions = [{"version": "run.1", "start": 0, "end": 1}, {"version": "run.2", "start": 1, "end": 2}]
    return {"choices": [usual | {"weight_versions": versions} | choice], "usage": {"prompt_tokens": 12}}


def parse(raw: dict, **settings):
    return VLLMBackend(ServerSettings()).parse(attempt(**settings), raw)


def test_a_response_has_the_version_of_each_token():
    parsed = parse(response())
    assert (parsed.token_ids, parsed.logprobs) == ([5, END], [(-0.25, 5), (-0.5, END)])
    assert (parsed.stop_reason, parsed.prompt_tokens) == ("stop", 12)
    assert parsed.weights == [("run.1", 1), ("run.2", 1)]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"finish_reason": "length", "stop_reason": None}, "length"),
        ({"finish_reason": "stop", "stop_reason": "</a>"}, "stop"),
        ({"finish_reason": "abort", "stop_reason": None}, "abort"),
    ],
)
def test_finish_reasons_become_stop_reasons(choice, reason):
    assert parse(response(**choice)).stop_reason == reason


def test_responses_that_cannot_be_used_are_refused():
    with pytest.raises(BadResponse, match="unknown reason: 'error'"):
        parse(response(finish_reason="error", stop_reason=None))
    with pytest.raises(BadResponse, match="not finite"):  # vLLM's number in place of one that is not
        parse(response(logprobs={"content": [{"token_id": 5, "logprob": -9999.0}, {"token_id": END, "logprob": -0.5}]}))
    with pytest.raises(ValueError, match="ended a response at token 9, which is not one of the stop ids"):
        parse(response(stop_reason=9))


def array(*rows) -> str:
    """Experts as vLLM returns them: two of each token, in one layer."""
    buffer = BytesIO()
    np.save(buffer, np.array(rows, np.uint8)[:, None])
    return base64.b64encode(buffer.getvalue()).decode()


def test_experts_are_requested_and_read_from_the_first_token_without_known_ones():
    request = replace(attempt().request, routing_from=11)
    assert body(attempt(request=request, expert_routing=True))["sampling_params"]["routed_experts_prompt_start"] == 11
    once = {"routed_experts": array([0, 1], [2, 0]), "weight_versions": [{"version": "run.2", "start": 0, "end": 2}]}
    assert parse(response(**once), expert_routing=True).experts.tolist() == [0, 1, 2, 0]
    assert parse(response(**once)).experts is None
    assert parse(response(routed_experts=None), expert_routing=True).experts is None
    for wrong in (b"\0\0\0", b"\x93NUMPY\x01\x00\x01\x00(", b"\x93NUMPY\x01\x00\xff\xff" + b"[" * 65535):
        with pytest.raises(BadResponse, match="experts of another form"):
            parse(response(routed_experts=base64.b64encode(wrong).decode()), expert_routing=True)


def test_experts_of_earlier_weights_are_unknown():
    """Of the rows of 12 prompt tokens and one response token, the last one is computed with the weights of the last token."""
    updated = response(routed_experts=array(*[[3, 4]] * 12, [5, 6]))
    assert parse(updated, expert_routing=True).experts.tolist() == [UNKNOWN_EXPERT] * 24 + [5, 6]


def test_experts_are_returned_by_gpus_and_by_cpus_with_another_model_runner(tmp_path):
    model = replace(MODEL, expert_routing=True)
    place = (tmp_path / "log", "127.0.0.1", 9)
    assert "--enable-return-routed-experts" in words_of(VLLMBackend(ServerSettings()).launch(model, *place, gpu=0))
    with pytest.raises(ValueError, match=r"on a CPU, train\.replay_routing must be False.*Triton"):
        VLLMBackend(ServerSettings()).launch(model, *place, gpu=None)
    settings = ServerSettings(env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert "--enable-return-routed-experts" in words_of(VLLMBackend(settings).launch(model, *place, gpu=None))


def words_of(launch) -> dict[str, str]:
    """The arguments of a command line by name; a flag is ``""``."""
    words = list(launch.command[3:])
    named: dict[str, str] = {}
    while words:
        name = words.pop(0)
        named[name] = words.pop(0) if words and not words[0].startswith("--") else ""
    return named


def test_the_command_line_on_gpus_has_the_runs_arguments_and_over_them_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    settings = ServerSettings(
        tp=2, args={"max_model_len": 4096, "enforce-eager": True, "enable-sleep-mode": False}, env={"A": "1"}
    )
    model = replace(MODEL, random_weights=True, lora=Lora(rank=4), sleep=True, memory_fraction=0.812)
    launch = VLLMBackend(settings).launch(model, tmp_path / "log", "127.0.0.1", 9, gpu=1)
    words = words_of(launch)
    assert launch.command[1:3] == ["-m", "vlmrl_vllm.start_server"]
    assert (words["--model"], words["--dtype"], words["--load-format"]) == ("/models/m", "bfloat16", "dummy")
    assert words["--runner"] == "generate"  # vLLM would guess it from a config, which may name no class
    assert (words["--host"], words["--port"], words["--tensor-parallel-size"]) == ("127.0.0.1", "9", "2")
    assert (words["--max-model-len"], words["--max-lora-rank"], words["--enforce-eager"]) == ("4096", "8", "")
    assert words["--gpu-memory-utilization"] == "0.812"
    assert "--no-enable-sleep-mode" in words and "--enable-sleep-mode" not in words
    assert words["--logprobs-mode"] == "processed_logprobs" and json.loads(words["--hf-overrides"])
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "5,6,4" and launch.env["A"] == "1"
    assert launch.env["PYTHONPATH"].startswith(str(ON_SERVER))


def test_the_command_line_without_gpus_starts_the_cpu_engine(tmp_path):
    launch = VLLMBackend(ServerSettings()).launch(MODEL, tmp_path / "log", "127.0.0.1", 9, gpu=None)
    words = words_of(launch)
    assert words["--kv-cache-memory-bytes"] == str(2**30) and "--hf-overrides" not in words
    assert "CUDA_VISIBLE_DEVICES" not in launch.env


def test_arguments_have_vllms_forms(tmp_path):
    args = {"enable_prefix_caching": False, "limit-mm-per-prompt": {"image": 4}, "max-model-len": None}
    args |= {"compilation-config.fast": False, "disable-log-stats": True}
    words = words_of(VLLMBackend(ServerSettings(args=args)).launch(MODEL, tmp_path / "log", "127.0.0.1", 9, gpu=None))
    assert "--no-enable-prefix-caching" in words and "--max-model-len" not in words
    assert json.loads(words["--limit-mm-per-prompt"]) == {"image": 4}
    assert words["--compilation-config.fast"] == "false" and words["--disable-log-stats"] == ""


@pytest.mark.parametrize(("args", "address"), [({}, "127.0.0.1"), ({"host": "0.0.0.0"}, "0.0.0.0")])
def test_the_address_is_the_settings_or_the_runs(args, address):
    assert VLLMBackend(ServerSettings(args=args)).listens_at("127.0.0.1") == address


def test_the_token_is_in_the_environment_and_not_in_the_command_line(tmp_path):
    backend = VLLMBackend(ServerSettings())
    launch = backend.with_token(backend.launch(MODEL, tmp_path / "log", "10.0.0.1", 9, None), "secret")
    assert launch.env[TOKEN_VARIABLE] == "secret" and "secret" not in " ".join(launch.command)
    assert launch.command[-2:] == ["--middleware", "vlmrl_vllm.require_token.RequireToken"]
    assert "secret" not in repr(launch)


def test_middleware_of_the_settings_is_called_after_ours(tmp_path):
    """vLLM calls the last one first."""
    backend = VLLMBackend(ServerSettings(args={"middleware": "mine.Counts"}))
    launch = backend.launch(replace(MODEL, lora=Lora(rank=4)), tmp_path / "log", "10.0.0.1", 9, None)
    words = list(backend.with_token(launch, "secret").command)
    given = [words[index + 1] for index, word in enumerate(words) if word == "--middleware"]
    assert given == ["mine.Counts", "vlmrl_vllm.adapters.LoadsAdapters", "vlmrl_vllm.require_token.RequireToken"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pipeline-parallel-size": 2}, "pipeline-parallel-size, but it is 2: .* set server.tp"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs-mode, but it is 'raw_logprobs': logprobs must be those"),
        ({"--enable-scale-out": False}, "enable-scale-out, but it is False: requests contain token ids"),
        ({"tensor-parallel-size": 2}, "tensor-parallel-size, but it is 2: set server.tp"),
        ({"port": 8000}, "port, but it is 8000: each server gets a free one"),
    ],
)
def test_arguments_that_would_make_a_server_useless_are_refused_before_it_starts(args, message):
    with pytest.raises(ValueError, match=rf"server\.args must not contain {message}"):
        VLLMBackend(ServerSettings(args=args))


def middleware(monkeypatch):
    """The middleware that vLLM loads, with the token `right`, around an application that notes the paths that reach it."""
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    spec = importlib.util.spec_from_file_location("require_token", ON_SERVER / "vlmrl_vllm/require_token.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reached = []

    async def app(scope, receive, send):
        reached.append(scope.get("path", scope["type"]))

    return module.RequireToken(app), reached


def status_of(app, path, *headers, kind="http") -> int | None:
    """The status that ``app`` answers with by itself."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return sent[0]["status"] if sent else None


def test_calls_without_the_token_do_not_reach_vllm(monkeypatch):
    app, reached = middleware(monkeypatch)
    for path in ("/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/models", "/health/x"):
        assert status_of(app, path) == 401
        assert status_of(app, path, (b"authorization", b"Bearer wrong")) == 401
    assert status_of(app, "/v1/realtime", kind="websocket") == 401
    assert reached == []
    assert status_of(app, "/update_weights", (b"authorization", b"Bearer right")) is None
    assert status_of(app, "/health") is None
    assert reached == ["/update_weights", "/health"]


def test_calls_for_adapters_are_those_that_the_middleware_answers():
    """vLLM's own are not there unless its environment allows them."""
    backend, source = VLLMBackend(ServerSettings()), (ON_SERVER / "vlmrl_vllm/adapters.py").read_text()
    for call in (backend.load_adapter("run.1", {}, "", tp=1), backend.unload_adapter("run.1")):
        assert f'"{call.path}"' in source


PACKAGES = "[pip3] numpy==2.3.4\n[pip3] nvidia-nccl-cu13==2.29.7\n[pip3] torch==2.13.0"


def info(mode: str = "processed_logprobs") -> dict:
    model = {"dtype": "torch.bfloat16", "max_model_len": 4096, "logprobs_mode": mode}
    config = {
        "model_config": model,
        "parallel_config": {"tensor_parallel_size": 2},
        "device_config": {"device": "cuda"},
    }
    return {"vllm_config": config, "system_env": {"vllm_version": "0.32.0", "pip_packages": PACKAGES}}


def test_a_server_reports_its_size_its_dtype_and_its_room():
    parsed = VLLMBackend(ServerSettings()).parse_info(info())
    assert parsed == ServerInfo("0.32.0", 2, "cuda", "bfloat16", max_prompt_tokens=4096, nccl="2.29.7")


def test_servers_with_other_logprobs_or_too_old_are_refused():
    backend = VLLMBackend(ServerSettings())
    with pytest.raises(ValueError, match=r"mode raw_logprobs.*start it with --logprobs-mode processed_logprobs"):
        backend.parse_info(info("raw_logprobs"))
    backend.check_version("http://a", ServerInfo("0.32.1"))
    with pytest.raises(ValueError, match=r"http://a is vLLM 0\.31\.2, but it must be 0\.32\.0 or newer"):
        backend.check_version("http://a", ServerInfo("0.31.2"))


# A server whose child would live on after it, with shared memory, as vLLM's engine process does.
STUBBORN = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
def sleep(words):
    memory = SharedMemory(create=True, size=1)
    print(memory.name, *words, flush=True)
    time.sleep(600)
def main():
    child = multiprocessing.get_context(METHOD).Process(target=sleep, args=(sys.argv[1:],))
    child.start()
    child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_server_that_is_killed_takes_its_children_and_their_shared_memory_with_it(method, tmp_path):
    folder = tmp_path / "vllm/entrypoints/launchers/api_server"
    folder.mkdir(parents=True)
    for each in [folder, *folder.parents[:3]]:
        (each / "__init__.py").touch()  # or an installed vLLM comes first
    (folder / "entry.py").write_text(STUBBORN.replace("METHOD", repr(method)))
    launch = VLLMBackend(ServerSettings(env={"PYTHONPATH": str(tmp_path)})).launch(
        MODEL, tmp_path / "log", "127.0.0.1", 9, None
    )
    process = LocalProcess(launch)
    process.start()
    group = process.group
    try:
        while process.alive and not launch.log.read_text().endswith("\n"):
            time.sleep(0.05)
        name, *words = launch.log.read_text().split()
        memory = Path("/dev/shm", name)
        assert words == launch.command[3:] and memory.exists()
        assert len(processes_of(group)) == 3  # the server, its child, and the one that watches
        os.kill(group, signal.SIGKILL)
        assert left_of([group]) == []
        wait_until(lambda: not memory.exists())
    finally:
        process.stop()
