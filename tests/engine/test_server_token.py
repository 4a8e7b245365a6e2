"""Tokens of servers: made for each one, sent with every request, and written nowhere."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from aiohttp import web
from testing.fake_sglang import FakeSGLang
from testing.servers import answering
from testing.sglang_engines import engine_of, plain, send, synced

from vlmrl.config import Config, Data, Gateway, Model, Rollout, ServerSettings, Train
from vlmrl.engine.base import EngineError, paused
from vlmrl.engine.server import TOKEN_VARIABLE, LocalProcess, Server, external_servers
from vlmrl.engine.server_backend import Call, Capabilities, ServedModel
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.engine.sglang.receiver import SGLangReceiver
from vlmrl.engine.vllm.backend import VLLMBackend
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agents import Agents, AgentSpec
from vlmrl.model import tiny
from vlmrl.run.program import run_training
from vlmrl.run.serving import LocalServerHost
from vlmrl.types import Task
from vlmrl.utils.http_server import free_ports
from vlmrl.utils.tokens import is_loopback
from vlmrl.weight_sync.base import WeightsRefused

MODEL = ServedModel("/model", "float32")
TOKEN = "0123456789abcdef" * 4


class Open(SGLangBackend):
    """A server program that checks no token."""

    capabilities = Capabilities()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.5"])
@pytest.mark.parametrize("backend", [SGLangBackend, VLLMBackend])
def test_each_server_gets_a_token_of_256_bits_that_no_other_has(backend, host):
    """On the loopback address, too: other users of the machine, and web pages, reach it there."""
    first, second = (backend(ServerSettings()).new_token(host) for _ in range(2))
    assert len(first) == 64 and first != second


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "[::1]"])
def test_a_server_program_that_checks_no_token_is_started_on_the_loopback_address(host):
    assert is_loopback(host)
    assert Open(ServerSettings()).new_token(host) is None


@pytest.mark.parametrize("host", ["10.0.0.5", "0.0.0.0", "::", "fe80::1", "node7", "localhost.example.org", ""])
def test_a_server_program_that_checks_no_token_is_started_nowhere_else(host):
    assert not is_loopback(host)
    with pytest.raises(ValueError, match=rf"must listen on the loopback address, but one would listen at {host}"):
        Open(ServerSettings()).new_token(host)


@pytest.mark.parametrize(("name", "value"), [("host", "0.0.0.0"), ("--host", "10.0.0.5"), ("host", "::")])
def test_a_setting_that_opens_a_server_to_other_machines_counts(name, value):
    with pytest.raises(ValueError, match="must listen on the loopback address"):
        Open(ServerSettings(args={name: value})).new_token("127.0.0.1")
    assert Open(ServerSettings(args={"host": None})).new_token("10.0.0.5") is None  # SGLang's default is 127.0.0.1


@pytest.mark.parametrize(
    ("backend", "name", "instead"),
    [
        (SGLangBackend, "api-key", TOKEN_VARIABLE),
        (SGLangBackend, "admin_api_key", TOKEN_VARIABLE),
        (VLLMBackend, "--api-key", TOKEN_VARIABLE),
        (VLLMBackend, "hf_token", "HF_TOKEN"),
    ],
)
def test_a_secret_in_the_config_is_refused_because_the_config_is_recorded(backend, name, instead):
    with pytest.raises(ValueError, match=rf"server\.args must not contain [a-z-]+: a secret .*{instead}") as error:
        backend(ServerSettings(args={name: "hunter2"}))
    assert "hunter2" not in str(error.value)
    VLLMBackend(ServerSettings(args={"hf-token": True}))  # the one that is saved on the machine


def test_running_servers_get_the_token_of_the_environment(monkeypatch):
    settings = ServerSettings(urls=("http://node7:30000", "http://node8:30000"))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert [server.token for server in external_servers(settings.urls)] == [None, None]
    monkeypatch.setenv(TOKEN_VARIABLE, f" {TOKEN}\n")
    assert [server.token for server in external_servers(settings.urls)] == [TOKEN, TOKEN]
    receiver = SGLangBackend(settings).receiver(Server("http://node7:30000", token=TOKEN))
    assert receiver.token == TOKEN and TOKEN not in repr(receiver)


@pytest.mark.slow
def test_an_agents_command_does_not_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN_VARIABLE, "t0psecret")
    agents = Agents(AgentSpec("env", command=("env",)), Gateway(), tmp_path)
    try:
        asyncio.run(agents.run(Task("t", []), AgentClient("http://127.0.0.1:9/t/x", "k"), "g"))
    finally:
        agents.close()
    log = (tmp_path / "g.log").read_text()
    assert "t0psecret" not in log and "OPENAI_API_KEY=k" in log


@pytest.fixture
def fake():
    made = FakeSGLang()
    made.token = TOKEN
    yield made
    made.close()


@pytest.mark.slow
def test_requests_updates_adapters_and_checks_bring_the_token(fake, tmp_path):
    engine = engine_of(fake, token=TOKEN)

    async def everything():
        sync = await synced(engine, tmp_path)
        async with paused(engine):
            await sync.push(send([3.0, 4.0]), 1)
            await sync.push_adapter({"a": torch.ones(2)}, {}, 2)
        await sync.checksums()
        return await engine.generate(plain())

    try:
        assert asyncio.run(everything()).policy_versions == [2, 2, 2]
        assert fake.weights["w"].tolist() == [3, 4]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "another"])
def test_a_server_that_refuses_the_token_is_an_error_that_says_where_to_set_it(fake, token):
    engine = engine_of(fake, token=token)
    try:
        with pytest.raises(
            EngineError, match=f"refuses the token of this run: set the environment variable {TOKEN_VARIABLE}"
        ) as e:
            asyncio.run(engine.start())
        assert TOKEN not in str(e.value) and "another" not in str(e.value)
    finally:
        engine.close()


# In place of SGLang's own module: like it, it writes its arguments to its log, and answers only requests with the key.
PROGRAM = """
import json, logging, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

words = sys.argv[1:]
args = {word: value for word, value in zip(words, [*words[1:], ""]) if word.startswith("--")}
logging.basicConfig(level="INFO", force=True)
logging.info(f"server_args={args}")
logging.info("launched by %s", words)
logging.info("not %d", "formatted")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + args["--api-key"]
        data = json.dumps({"version": "0.5.23", "main": __name__}).encode()
        self.send_response(200 if right or self.path == "/health" else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer((args["--host"], int(args["--port"])), Handler).serve_forever()
"""


@pytest.mark.slow
def test_a_started_server_wants_the_token_and_neither_its_log_nor_its_command_line_has_it(tmp_path):
    package = tmp_path / "code/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(textwrap.dedent(PROGRAM))
    [port] = free_ports(1)
    # Flags without a value.
    nothing = dict.fromkeys(("disable-cuda-graph", "disable-overlap-schedule", "sleep-on-idle"))
    settings = ServerSettings(args=nothing, env={"PYTHONPATH": str(tmp_path / "code")}, python=sys.executable)
    backend = SGLangBackend(settings)
    launch = backend.with_token(backend.launch(MODEL, tmp_path / "log", "127.0.0.1", port, gpu=None), TOKEN)
    process = LocalProcess(launch)
    server = Server(f"http://127.0.0.1:{port}", process, token=TOKEN)
    pool = ServerPool(backend, [server])

    async def start():
        await pool.start()
        found = await pool.call(server, *Call("/server_info"))
        command = Path(f"/proc/{process.group}/cmdline").read_bytes().decode()
        server.token = "another"
        with pytest.raises(EngineError, match="refuses the token of this run: it has another"):
            await pool._info(server)
        await pool.close()
        return found, command

    found, command = asyncio.run(start())
    assert found["main"] == "__main__" and server.info.version == "0.5.23"
    log = (tmp_path / "log").read_text()
    assert log.count("'<token>'") == 2 and "--host" in command
    assert TOKEN not in log + command


@pytest.mark.slow
def test_a_run_with_running_servers_records_their_token_nowhere(fake, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    fake.finish = {"type": "length", "length": 3}
    config = Config(
        name="guarded",
        output_dir=str(tmp_path),
        model=Model(path=str(tiny.build(tmp_path / "model", "qwen3")), device="cpu", dtype="float32"),
        data=Data(generator=lambda index, seed: {"prompt": "Say a."}, size=4),
        reward=lambda text, task: 1.0,
        rollout=Rollout(group_size=2, max_tokens=64, max_response_tokens=8),
        engine="sglang",
        server=ServerSettings(urls=(fake.url,), sync="tensor", check=False),
        train=Train(steps=1, groups_per_batch=2),
    )
    run_training(config)
    assert fake.version != "default"
    files = [path for path in config.folder.rglob("*") if path.is_file()]
    assert config.folder / "config.json" in files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in "".join(capfd.readouterr())


def test_a_server_on_this_machine_gets_its_token_in_its_environment(tmp_path):
    settings = ServerSettings()
    [server] = LocalServerHost(settings, tmp_path, torch.device("cpu"), ranks=1).servers(SGLangBackend(settings), MODEL)
    assert server.token is not None and server.process.launch.env[TOKEN_VARIABLE] == server.token


@pytest.mark.slow
def test_a_token_that_a_server_repeats_is_in_no_error(monkeypatch):
    """`crash.txt` has the errors, and is sent to others."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)

    async def repeat(request: web.Request) -> web.Response:
        status = {"/health": 200, "/server_info": 500}.get(request.path, 403)
        return web.Response(status=status, text=f"no: {request.headers['Authorization']}")

    async def start(url: str) -> None:
        settings = ServerSettings(urls=(url,), start_timeout=60.0)
        pool = ServerPool(SGLangBackend(settings), external_servers(settings.urls))
        try:
            await pool.start()
        finally:
            await pool.close()

    with answering(repeat) as url:
        with pytest.raises(EngineError, match=r"no: Bearer \[the key\]") as error:
            asyncio.run(start(url))
        with pytest.raises(WeightsRefused, match=r"no: Bearer \[the key\]") as refused:
            SGLangReceiver.of(external_servers([url])[0], 60.0).post("/begin_weight_update", {})
    assert TOKEN not in str(error.value) + str(refused.value)
