"""The server engine with the SGLang backend, against a fake server that speaks its protocol."""

from __future__ import annotations

import asyncio
import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from testing import sglang_engines
from testing.fake_sglang import END, FakeSGLang
from testing.fakes import PAD, Router, make_item
from testing.sglang_engines import checked, serving, until
from torch import nn

from vlmrl.config import Lora, ServerSettings
from vlmrl.engine import server_pool
from vlmrl.engine.base import EngineError, Request, SamplingParams, paused
from vlmrl.engine.server_backend import ServedModel
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.types import ExpertRouting

pytestmark = pytest.mark.slow

ROUTING = ExpertRouters(nn.ModuleList([Router()]), "Router")  # one layer, two of three experts


@pytest.fixture
def fakes():
    made = [FakeSGLang(pad=PAD) for _ in range(2)]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def engine_of():
    """Makes an engine with these servers, which serve. Their initial weights are policy version 3."""
    engines = []

    def make(*fakes, **settings):
        engines.append(sglang_engines.engine_of(*fakes, **settings))
        return asyncio.run(serving(engines[-1]))

    yield make
    for engine in engines:
        engine.close()


def generate(engine, request):
    return asyncio.run(engine.generate(request))


def plain(name="t", ids=(1, 2, 3)):
    return Request(name, list(ids), [], SamplingParams(8))


def test_a_response_becomes_a_completion(fakes, engine_of):
    completion = generate(engine_of(fakes[0]), plain())
    assert completion.token_ids == [5, 6, END]
    assert completion.logprobs == [-0.25, -0.5, -0.75]
    assert completion.stop_reason == "stop"
    assert completion.policy_versions == [3, 3, 3]
    assert completion.prompt_tokens == 3


def test_a_request_holds_unexpanded_ids_one_png_per_image_and_the_ban(fakes, engine_of):
    item = make_item("red", 4)  # 4 tokens, 128x32 pixels
    request = Request("t", [1, PAD, 2], [item], SamplingParams(8, 0.5, 0.9, 20, ("</answer>",)))
    completion = generate(engine_of(fakes[0]), request)
    assert completion.prompt_tokens == 6
    [body] = fakes[0].bodies_of("/generate")
    assert body["input_ids"] == [1, PAD, 2]
    [uri] = body["image_data"]
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (128, 32)
    assert body["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "stop": ["</answer>"],
        "stop_token_ids": [END],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logit_bias": {str(PAD): -1e9},
    }


def experts(*rows):
    """As a server returns them, for one layer: two experts per token."""
    return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()


def test_experts_are_returned_for_the_tokens_whose_experts_are_not_known(fakes, engine_of):
    fakes[0].meta = {"routed_experts": experts([0, 1], [2, 0], [1, 2], [0, 2])}
    request = Request("t", [1, 2, 3], [], SamplingParams(8), routing_from=1)
    completion = generate(engine_of(fakes[0], routing=ROUTING), request)
    assert completion.expert_routing == [
        ExpertRouting(bytes([a, 0, b, 0]), 2) for a, b in ((0, 1), (2, 0), (1, 2), (0, 2))
    ] + [None]
    [body] = fakes[0].bodies_of("/generate")
    assert body["return_routed_experts"] and body["routed_experts_start_len"] == 1


def test_experts_of_tokens_that_earlier_weights_sampled_are_not_known(fakes, engine_of):
    engine = engine_of(fakes[0], routing=ROUTING)
    engine.versions["new"] = 4
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "new", "start": 2, "end": 3}]
    fakes[0].meta = {"routed_experts": experts([0, 1], [2, 0], [1, 2], [0, 2], [2, 1]), "weight_versions": spans}
    completion = generate(engine, plain())
    assert completion.policy_versions == [3, 3, 4]
    assert [route is None for route in completion.expert_routing] == [False, False, False, True, True, True]


def test_experts_that_are_missing_or_not_the_models_are_an_error(fakes, engine_of):
    engine = engine_of(fakes[0], routing=ROUTING)
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        generate(engine, plain())
    fakes[0].meta = {"routed_experts": experts([0, 1], [2, 0])}
    with pytest.raises(ValueError, match=r"returned 4 experts for 5 tokens, which is not 2 in each of 1 layers"):
        generate(engine, plain())


def test_a_different_prompt_length_on_the_server_is_an_error_that_names_both(fakes, engine_of):
    fakes[0].tokens_per_image = 3
    with pytest.raises(ValueError, match="counted 5 prompt tokens, but the renderer 6"):
        generate(engine_of(fakes[0]), Request("t", [1, PAD, 2], [make_item("red", 4)]))


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"type": "length", "length": 3}, "length"),
        ({"type": "stop", "matched": "</answer>"}, "stop"),
        ({"type": "abort", "message": "Aborted", "status_code": None}, "abort"),
    ],
)
def test_finish_reasons_become_stop_reasons(fakes, engine_of, finish, reason):
    fakes[0].finish = finish
    assert generate(engine_of(fakes[0]), plain()).stop_reason == reason


def test_a_stop_at_an_unknown_stop_id_is_refused(fakes, engine_of):
    fakes[0].finish = {"type": "stop", "matched": 6}
    with pytest.raises(ValueError, match=r"ended a response at token 6, which is not one of the stop ids \[258\]"):
        generate(engine_of(fakes[0]), plain())


def test_a_response_from_weights_that_were_never_sent_is_rejected(fakes, engine_of):
    fakes[0].version = "somebody else's"
    with pytest.raises(EngineError, match='weights "somebody else\'s", which this run never sent'):
        generate(engine_of(fakes[0], retries=1), plain())


def test_a_response_from_weights_older_than_those_that_were_sent_is_rejected(fakes, engine_of, monkeypatch):
    """A sender of one's own, or a server, that lets an update be lost: a synchronous run trained on the samples of old weights."""
    engine = engine_of(fakes[0], retries=1)
    drained, drain = [], engine.servers.drain

    async def noted(server):
        drained.append(server)
        await drain(server)

    monkeypatch.setattr(engine.servers, "drain", noted)
    engine.weights_changed(4)
    with pytest.raises(EngineError, match="sampled from weights of version 3, not of 4"):
        generate(engine, plain())
    assert set(drained) == set(engine.servers.all)  # it is sent the weights again before it serves


def test_a_response_with_wrong_or_missing_logprobs_is_rejected(fakes, engine_of):
    engine = engine_of(fakes[0], retries=0)
    for logprobs in (
        [[-1.0, 5, None]],
        [[-1.0, 5, None], [-1.0, 7, None], [-1.0, END, None]],
        [[None, t, None] for t in (5, 6, END)],
    ):
        fakes[0].meta = {"output_token_logprobs": logprobs}
        with pytest.raises(EngineError, match="logprobs of other ids, or with logprobs that are not finite"):
            generate(engine, plain())


def test_a_response_over_the_limit_is_a_failed_attempt(fakes, engine_of, monkeypatch):
    engine = engine_of(fakes[0], retries=0)
    monkeypatch.setattr("vlmrl.engine.server_pool.MOST_BYTES", 10)
    with pytest.raises(EngineError, match="the response has more than 10 bytes"):
        generate(engine, plain())


def test_a_trajectory_stays_with_its_server(fakes, engine_of):
    engine = engine_of(*fakes)
    for turn in range(3):
        for name in ("a", "b"):
            generate(engine, plain(name, range(1, 4 + turn)))
    ids = [[body["input_ids"] for body in fake.bodies_of("/generate")] for fake in fakes]
    assert sorted(map(len, ids)) in ([0, 6], [3, 3])


def test_the_server_with_least_to_do_gets_a_new_trajectory(fakes, engine_of):
    engine = engine_of(*fakes)
    for fake in fakes:
        fake.hangs = True

    async def four():
        tasks = [asyncio.create_task(engine.generate(plain(f"t{i}"))) for i in range(4)]
        await until(lambda: sum(len(fake.bodies_of("/generate")) for fake in fakes) == 4)
        counts = [len(fake.bodies_of("/generate")) for fake in fakes]
        for fake in fakes:
            fake.release_requests()
        await asyncio.gather(*tasks)
        return counts

    assert asyncio.run(four()) == [2, 2]


def test_another_server_takes_over_and_keeps_the_trajectory(fakes, engine_of):
    engine = engine_of(*fakes)
    generate(engine, plain())
    first = next(fake for fake in fakes if fake.bodies_of("/generate"))
    second = next(fake for fake in fakes if fake is not first)
    first.statuses = [500]
    generate(engine, plain())
    generate(engine, plain())
    assert (len(first.bodies_of("/generate")), len(second.bodies_of("/generate"))) == (2, 2)


def test_a_refused_request_is_not_sent_again(fakes, engine_of):
    fakes[0].statuses = [400]
    with pytest.raises(EngineError, match=r"trajectory .*HTTP 400: set by the test"):  # of this trajectory alone
        generate(engine_of(fakes[0]), plain())
    assert len(fakes[0].bodies_of("/generate")) == 1


def test_a_cancelled_request_is_aborted_on_the_server(fakes, engine_of):
    engine = engine_of(fakes[0])
    fakes[0].hangs = True

    async def give_up():
        response = asyncio.create_task(engine.generate(plain()))
        await until(lambda: fakes[0].bodies_of("/generate"))
        response.cancel()
        with pytest.raises(asyncio.CancelledError):
            await response
        await until(lambda: fakes[0].aborted)

    asyncio.run(give_up())
    assert fakes[0].aborted == [fakes[0].bodies_of("/generate")[0]["rid"]]


def test_a_pause_during_a_health_check_does_not_drain_the_server(fakes, engine_of, monkeypatch):
    engine, clock = engine_of(fakes[0]), SimpleNamespace(now=0.0)
    server = engine.servers.all[0]
    monkeypatch.setattr(server_pool, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def pause():
        fakes[0].sick = True  # as a paused server looks
        await until(lambda: server.unresponsive)
        async with paused(engine):
            clock.now += 2 * engine.servers.limits.health_timeout
            await checked(engine, server)  # the check that had begun has failed
            return server.ready

    assert asyncio.run(pause())


def test_waiting_requests_continue_when_an_unresponsive_server_is_healthy_again(fakes, engine_of):
    engine = engine_of(fakes[0], start_timeout=3600.0)

    async def doubt():
        fakes[0].sick = True
        await until(lambda: engine.servers.all[0].unresponsive)
        task = asyncio.create_task(engine.generate(plain()))
        await until(lambda: engine._requests)
        fakes[0].sick = False
        async with asyncio.timeout(120):
            return await task

    assert asyncio.run(doubt()).token_ids == [5, 6, END]


def test_the_command_line_on_gpus_has_the_runs_arguments_and_over_them_the_settings(tmp_path):
    settings = ServerSettings(
        tp=2, args={"mem_fraction_static": 0.4, "log-requests": True}, env={"A": "1"}, python="py"
    )
    model = ServedModel(
        "/model", "bfloat16", lora=Lora(rank=4, targets=("q_proj", "o_proj")), expert_routing=True, sleep=True
    )
    launch = SGLangBackend(settings).launch(model, tmp_path / "log", "127.0.0.1", 30000, gpu=2)
    assert " ".join(launch.command) == (
        "py -m sglang.launch_server --host 127.0.0.1 --port 30000 --tp 2 --base-gpu-id 2 --enable-fp32-lm-head "
        "--mm-preprocess-cache-size-mb 4096 --trust-mm-content-hashes --model-path /model --dtype bfloat16 "
        "--enable-return-routed-experts --mem-fraction-static 0.4 --enable-lora --max-lora-rank 4 "
        "--lora-target-modules q_proj o_proj --max-loras-per-batch 4 --max-loaded-loras 8 --enable-memory-saver "
        "--mm-feature-transport cpu --image-processor-backend pil --log-requests"
    )
    assert launch.env.pop("PYTHONPATH").split(":")[0].endswith("vlmrl/engine/sglang/on_server")
    package = {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "vlmrl_sglang"}
    assert launch.env == {"SGLANG_VLM_CACHE_SIZE_MB": "0", "A": "1"} | package


def test_the_servers_search_path_keeps_what_the_settings_or_this_process_have(tmp_path, monkeypatch):
    def path(env) -> list[str]:
        backend = SGLangBackend(ServerSettings(env=env))
        launch = backend.launch(ServedModel("/model", "bfloat16"), tmp_path, "127.0.0.1", 1, gpu=0)
        return launch.env["PYTHONPATH"].split(":")[1:]

    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert path({}) == ["/mine"] and path({"PYTHONPATH": "/settings"}) == ["/settings"]
    monkeypatch.delenv("PYTHONPATH")
    assert path({}) == []


def test_a_colocated_server_gets_its_share_of_the_gpu_unless_the_settings_say_another(tmp_path):
    model = ServedModel("/model", "bfloat16", sleep=True, memory_fraction=0.70196)

    def words(**args) -> str:
        backend = SGLangBackend(ServerSettings(args=args))
        return " ".join(backend.launch(model, tmp_path / "log", "127.0.0.1", 1, gpu=0).command)

    assert "--mem-fraction-static 0.701" in words()  # rounded down
    assert "--mem-fraction-static 0.5" in words(mem_fraction_static=0.5) and "0.70" not in words(
        mem_fraction_static=0.5
    )
    assert "--mm-feature-transport cuda_ipc" in words(**{"mm-feature-transport": "cuda_ipc"})


def test_a_server_with_gpus_of_its_own_keeps_sglangs_defaults_for_memory(tmp_path):
    launch = SGLangBackend(ServerSettings()).launch(ServedModel("/model", "bfloat16"), tmp_path, "127.0.0.1", 1, gpu=0)
    assert not {"--mem-fraction-static", "--mm-feature-transport", "--image-processor-backend"} & set(launch.command)
    assert "--enable-fp32-lm-head" in launch.command


def test_the_command_line_without_gpus_starts_the_cpu_engine(tmp_path):
    settings = ServerSettings(args={"device": None, "max-total-tokens": 100})
    model = ServedModel("/model", "float32", random_weights=True)
    launch = SGLangBackend(settings).launch(model, tmp_path / "log", "127.0.0.1", 30000, gpu=None)
    words = " ".join(launch.command)
    assert "--load-format dummy" in words and "--max-total-tokens 100" in words
    assert "--device" not in words and "--base-gpu-id" not in words
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
