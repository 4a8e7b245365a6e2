"""What every server of vlmrl refuses: to listen to the world without a token, strangers, bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from aiohttp import StreamReader, web
from aiohttp.typedefs import Handler
from testing.servers import served

from vlmrl.cli import main as cli
from vlmrl.env.remote import env_server
from vlmrl.retrieval import retrieval_server
from vlmrl.utils import http_server
from vlmrl.utils.http_server import BODY, Binding, guarded, send_rest
from vlmrl.utils.tokens import bearer, bearer_headers, bearer_token, is_loopback

pytestmark = pytest.mark.slow
LIMIT = 600.0  # seconds, for a machine that is ten times too slow
TOKEN = "s3cret-token"


def echo() -> web.Application:
    """Returns the body of a request."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=request[BODY])

    app = web.Application()
    app.router.add_post("/", answer)
    app.router.add_get("/open", answer)
    return app


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", *lines, "", ""]).encode("latin-1")


def told(url: str, content: bytes) -> bytes:
    """The server's answer to what is sent over a socket, until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
        connection.sendall(content)
        received = bytearray()
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


@pytest.fixture(scope="module")
def with_token() -> Iterator[str]:
    with served(guarded(echo(), TOKEN, 100, public=("/open",))) as url:
        yield url


@pytest.fixture(scope="module")
def without_token() -> Iterator[str]:
    with served(guarded(echo(), None, 100)) as url:
        yield url


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        ("Bearer", 401),
        ("Bearer s3cret-toke", 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer \xe9", 401),
        (f"Basic {TOKEN}", 401),
        (f"bearer {TOKEN}", 200),
        (f"Bearer {TOKEN}", 200),
    ],
)
def test_a_token_is_wanted_whole(with_token: str, header: str | None, status: int):
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    response = httpx.post(with_token, content=b"hello", headers=headers, timeout=LIMIT)
    assert response.status_code == status and TOKEN not in response.text
    assert httpx.get(f"{with_token}/open", headers=headers, timeout=LIMIT).status_code == 200


def test_two_tokens_are_none(with_token: str):
    right, wrong = (b"Authorization", f"Bearer {TOKEN}".encode()), (b"Authorization", b"Bearer x")
    for headers in ([wrong, right], [right, wrong], [right, right]):
        assert httpx.post(with_token, headers=headers, timeout=LIMIT).status_code == 401


def test_a_body_that_is_refused_by_its_headers_is_not_awaited(with_token: str, without_token: str):
    assert b" 401 " in told(with_token, head("Host: x", "Content-Length: 50"))
    assert b" 413 " in told(without_token, head("Host: localhost", "Content-Length: 101"))


def test_a_body_may_have_so_many_bytes_declared_or_not(without_token: str):
    def chunks(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield b"x" * 10

    assert httpx.post(without_token, content=b"x" * 100, timeout=LIMIT).text == "x" * 100
    assert httpx.post(without_token, content=chunks(10), timeout=LIMIT).text == "x" * 100
    for content in (b"x" * 101, chunks(11)):
        response = httpx.post(without_token, content=content, timeout=LIMIT)
        assert response.status_code == 413 and "more than 100 bytes (--max-body-mib)" in response.text


def test_a_body_is_taken_as_it_was_sent(without_token: str):
    packed = gzip.compress(b"x" * 10_000)
    assert (
        httpx.post(without_token, content=packed, headers={"Content-Encoding": "gzip"}, timeout=LIMIT).content == packed
    )


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_body_of_tiny_chunks_does_not_stop_the_event_loop(is_refused: bool, monkeypatch: pytest.MonkeyPatch):
    """16,000 chunks of one byte were parsed and read in one go, which took 0.15 s, also to drop them."""
    rounds, chunks = [0], Counter[int]()
    parsed = StreamReader.end_http_chunk_receiving

    def counted(reader: StreamReader) -> None:
        chunks[rounds[0]] += 1
        parsed(reader)

    async def count_rounds(app: web.Application) -> AsyncIterator[None]:
        async def count() -> None:
            while True:
                rounds[0] += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        yield
        counter.cancel()

    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", counted)
    app = echo()
    app.cleanup_ctx.append(count_rounds)
    with served(guarded(app, TOKEN if is_refused else None, 50_000)) as url:
        answer = told(
            url,
            head("Host: localhost", "Transfer-Encoding: chunked", "Connection: close")
            + b"1\r\nx\r\n" * 40_000
            + b"0\r\n\r\n",
        )
    assert b" 401 " in answer if is_refused else answer.endswith(b"x" * 40_000)
    assert chunks.total() == 40_001 and max(chunks.values()) <= 1000  # with the last, empty one


def test_a_body_that_never_ends_or_is_malformed_is_refused(without_token: str):
    with served(guarded(echo(), None, 100, seconds=0.2)) as impatient:
        assert b" 408 " in told(impatient, head("Host: localhost", "Content-Length: 50") + b"half")
    chunked = head("Host: localhost", "Transfer-Encoding: chunked")
    assert b" 400 " in told(without_token, chunked + b"no length\r\n")


@pytest.mark.parametrize("host", ["127.0.0.1:8321", "localhost", "localhost:1", "[::1]:8321", "127.1.2.3"])
def test_without_a_token_names_of_this_machine_are_answered(without_token: str, host: str):
    assert httpx.post(without_token, content=b"hello", headers={"Host": host}, timeout=LIMIT).text == "hello"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost@evil", "", "[", "0.0.0.0"]
)
def test_without_a_token_other_names_are_refused(without_token: str, with_token: str, host: str):
    response = httpx.post(without_token, content=b"hello", headers={"Host": host}, timeout=LIMIT)
    assert response.status_code in (400, 403) and "hello" not in response.text
    headers = {"Host": host or "x.example", "Authorization": f"Bearer {TOKEN}"}
    if host != "[":
        assert httpx.post(with_token, content=b"hello", headers=headers, timeout=LIMIT).text == "hello"


def test_without_a_token_one_name_is_wanted(without_token: str):
    for lines in ([], ["Host: localhost", "Host: evil.example"]):
        answer = told(without_token, head(*lines, "Content-Length: 0", "Connection: close"))
        assert b" 403 " in answer or b" 400 " in answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Origin": "http://localhost:8888", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
def test_without_a_token_a_page_elsewhere_makes_no_request(without_token: str, headers: dict[str, str], status: int):
    """A browser sends such a POST without asking the server first: it stepped sessions and searched, though the page read nothing."""
    response = httpx.post(without_token, content=b"hello", headers=headers, timeout=LIMIT)
    assert response.status_code == status and (status == 200) == (response.text == "hello")


async def large(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(2**26))


async def large_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    return await send_rest(request, response, bytes(2**26))


async def missing(request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound(text="-" * 2**26)


@pytest.mark.parametrize("handler", [large, large_stream, missing])
def test_a_client_that_never_reads_is_given_up(handler: Handler, monkeypatch: pytest.MonkeyPatch):
    given_up = threading.Event()

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionAbortedError:
            given_up.set()
            raise

    monkeypatch.setattr(http_server, "SEND_SECONDS", 0.1)
    app = web.Application(middlewares=[watch])
    app.router.add_post("/", handler)
    with served(guarded(app, None, 100)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head("Host: localhost", "Content-Length: 0"))
            assert given_up.wait(LIMIT)


def test_the_bodies_of_all_requests_have_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "memory_bytes", lambda: 400)
    with served(guarded(echo(), None, 100)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as slow:
            slow.sendall(head("Host: localhost", "Content-Length: 61", "Connection: close") + b"x" * 60)
            while (response := httpx.post(url, content=b"y" * 50, timeout=LIMIT)).status_code == 200:
                pass  # until the server has read what the other client sent
            assert response.status_code == 503 and "more than 100 bytes: try again" in response.text
            slow.sendall(b"z")
            assert slow.makefile("rb").read().endswith(b"x" * 60 + b"z")
        assert httpx.post(url, content=b"y" * 100, timeout=LIMIT).text == "y" * 100


@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_that_nobody_reads_have_a_limit_together(is_stream: bool, monkeypatch: pytest.MonkeyPatch):
    """400 connections that asked a retriever for 10 times 1,000 hits and read nothing took 2 GB in a minute."""
    large = b"x" * 2**25  # more than the connection's buffers hold
    monkeypatch.setattr(http_server, "memory_bytes", lambda: 6 * len(large))

    async def answer(request: web.Request) -> web.StreamResponse:
        if not is_stream:
            return web.Response(body=large)
        response = web.StreamResponse()
        await response.prepare(request)
        return await send_rest(request, response, large)

    app = web.Application()
    app.router.add_post("/", answer)
    with served(guarded(app, None, 100)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as slow:
            slow.sendall(head("Host: localhost", "Content-Length: 0", "Connection: close"))
            begun = slow.recv(2**16, socket.MSG_WAITALL)
            if is_stream:
                with pytest.raises(httpx.RemoteProtocolError):
                    httpx.post(url, timeout=LIMIT)
            else:
                refused = httpx.post(url, timeout=LIMIT)
                assert (
                    refused.status_code == 503 and f"more than {len(large) * 3 // 2} bytes: try again" in refused.text
                )
            received = len(begun)
            while part := slow.recv(2**20):
                received += len(part)
            assert received > len(large)
        assert len(httpx.post(url, timeout=LIMIT).content) == len(large)


def test_a_public_page_that_nobody_reads_takes_no_room(monkeypatch: pytest.MonkeyPatch):
    """Anybody may ask for it, without the token, and would have those with the token refused."""
    large = b"x" * 2**25
    monkeypatch.setattr(http_server, "memory_bytes", lambda: 6 * len(large))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=large)

    app = web.Application()
    app.router.add_get("/", answer)
    app.router.add_get("/own", answer)
    with served(guarded(app, TOKEN, 100, public=("/",))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            slow.recv(2**16, socket.MSG_WAITALL)
            assert httpx.get(f"{url}/own", headers=bearer(TOKEN), timeout=LIMIT).content == large


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_need_no_token(host: str):
    assert is_loopback(host)
    assert Binding(host, 8000, None, 100, "MY_TOKEN").token is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "0", "myhost"])
def test_other_addresses_need_a_token(host: str):
    assert not is_loopback(host)
    with pytest.raises(ValueError, match=r"--host .* can be reached from other machines, .* variable MY_TOKEN"):
        Binding(host, 8000, None, 100, "MY_TOKEN")
    assert Binding(host, 8000, TOKEN, 100, "MY_TOKEN").token == TOKEN


def test_an_address_is_printed_as_a_url():
    assert Binding("::1", 8000, None, 100, "MY_TOKEN").url("/retrieve") == "http://[::1]:8000/retrieve"


@pytest.mark.parametrize("token", ["two words", "l1ne\nl1ne", "caf\xe9"])
def test_a_token_that_no_header_can_hold_is_refused_without_being_shown(token: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", token)
    with pytest.raises(ValueError, match="the environment variable MY_TOKEN must hold") as error:
        bearer_token("MY_TOKEN")
    assert token not in str(error.value)


def test_an_empty_variable_holds_no_token(monkeypatch: pytest.MonkeyPatch):
    for value in ("", " \n"):
        monkeypatch.setenv("MY_TOKEN", value)
        assert bearer_token("MY_TOKEN") is None and bearer_headers("MY_TOKEN") == {}
    monkeypatch.setenv("MY_TOKEN", f"{TOKEN}\n")
    assert bearer_headers("MY_TOKEN") == {"Authorization": f"Bearer {TOKEN}"}


CORPUS = '{"id": "p", "text": "Paris is the capital of France."}\n'


ENV = """
from vlmrl import Env, obs

class Ask(Env):
    def step(self, response_text):
        return obs(), True, {"reward": 1.0}
"""


@pytest.fixture(params=["env", "retriever"])
def command(request: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `vlmrl env serve` or `vlmrl retriever serve` with more options; what would have been served is in the list it returns."""
    monkeypatch.setenv("VLMRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.jsonl").write_text(CORPUS)
    (tmp_path / "ask.py").write_text(ENV)
    words = {
        "env": ["env", "serve", f"{tmp_path / 'ask.py'}:Ask"],
        "retriever": ["retriever", "serve", "--corpus", str(tmp_path / "corpus.jsonl")],
    }
    served: list[Any] = []
    for module in (env_server, retrieval_server):

        def run_server(app: Any, binding: Binding, what: str, path: str = "") -> None:
            print(what, binding.url(path))
            served.append(binding)

        monkeypatch.setattr(module, "run_server", run_server)
    monkeypatch.delenv("VLMRL_ENV_TOKEN", raising=False)
    monkeypatch.delenv("VLMRL_RETRIEVER_TOKEN", raising=False)

    def run(*options: str) -> list[Any]:
        monkeypatch.setattr(sys, "argv", ["vlmrl", *words[request.param], *options])
        cli.main()
        return served

    run.variable = f"VLMRL_{request.param.upper()}_TOKEN"
    return run


def test_both_commands_want_a_token_for_the_world(command: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SystemExit, match="1"):
        command("--host", "0.0.0.0")
    assert "so a token is required: put one into the environment variable VLMRL_" in capsys.readouterr().err
    monkeypatch.setenv(command.variable, TOKEN)
    (binding,) = command("--host", "0.0.0.0")
    assert binding == Binding("0.0.0.0", binding.port, TOKEN, binding.max_body, binding.token_variable)
    printed = capsys.readouterr()
    assert "http://0.0.0.0:" in printed.out and " (requires a token)" in printed.out
    assert TOKEN not in printed.out + printed.err + repr(binding)


def test_both_commands_listen_on_the_loopback_address_by_default_and_take_any_variable(
    command: Any, monkeypatch: pytest.MonkeyPatch
):
    (binding,) = command("--max-body-mib", "0.5")
    assert (binding.host, binding.token, binding.max_body) == ("127.0.0.1", None, 2**19)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert command("--token-variable", "MY_TOKEN")[1].token == TOKEN


def test_a_port_in_use_is_said_before_the_address(capsys: Any):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} of --host 127.0.0.1 is in use: choose another one"):
            http_server.run_server(echo(), Binding("127.0.0.1", port, None, 100, "MY_TOKEN"), "echo")
    assert capsys.readouterr().out == ""


def test_the_port_that_the_system_chose_is_printed(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    ports: list[int] = []
    monkeypatch.setattr(http_server, "serve_on", lambda listener, app: ports.append(listener.getsockname()[1]))
    http_server.run_server(echo(), Binding("127.0.0.1", 0, None, 100, "MY_TOKEN"), "echo", "/echo")
    assert capsys.readouterr().out == f"echo at http://127.0.0.1:{ports[0]}/echo\n"


def test_the_guard_is_around_what_is_run(monkeypatch: pytest.MonkeyPatch):
    ran: list[web.Application] = []
    monkeypatch.setattr(http_server, "serve_on", lambda listener, app: ran.append(app))
    http_server.run_server(echo(), Binding("127.0.0.1", 0, TOKEN, 100, "MY_TOKEN"), "echo")
    with served(ran[0]) as url:
        assert httpx.post(url, timeout=LIMIT).status_code == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.post(url, content=b"hello", headers=headers, timeout=LIMIT).text == "hello"
        assert httpx.post(url, content=b"x" * 101, headers=headers, timeout=LIMIT).status_code == 413
