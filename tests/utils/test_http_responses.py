"""What a response may be: its size, its time, its form; which failures another attempt may not meet; and how a request is aborted."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import StreamReader, web
from testing.servers import answering, closed_port

from vlmrl.utils import http
from vlmrl.utils.http import HttpClient, RefusedError, RetryableError, UnreachableError

pytestmark = pytest.mark.slow
ANSWERS = {
    "/ok": (200, '{"a": 1}'),
    "/down": (500, "down"),
    "/busy": (429, "busy"),
    "/missing": (404, "no such path"),
    "/made": (201, "made"),
    "/html": (200, "<html>"),
    "/deep": (200, "[" * 100_000),
    "/many": (200, "[" + "[]," * 500_000 + "[" * 500_000),
    "/digits": (200, "9" * 4000),
    "/100": (200, "x" * 100),
    "/101": (200, "x" * 101),
    "/moved": (302, ""),
}
BODIES: list[bytes] = []


async def answer(request: web.Request) -> web.StreamResponse:
    BODIES.append(await request.read())
    if request.path == "/hangs":
        await asyncio.sleep(3600)
    if request.path != "/drips":
        status, text = ANSWERS[request.path]
        return web.Response(status=status, text=text, headers={"Location": "/ok"})
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with answering(answer) as address:
        yield address


def test_a_response_that_drips_ends_at_the_deadline(url: str):
    with pytest.raises(RetryableError, match=r"no whole response in 0.2 s"):
        HttpClient(600.0).send("GET", f"{url}/drips", seconds=0.2)
    with pytest.raises(RetryableError, match=r"no whole response in 0.1 s"):
        HttpClient(0.1).send("GET", f"{url}/drips")


def test_a_silent_server_is_given_up_before_the_deadline(url: str):
    with pytest.raises(RetryableError, match=r"^(Socket|Connection)TimeoutError"):  # which is for the machine to say
        HttpClient(0.1).send("GET", f"{url}/hangs", seconds=600.0)


def test_a_response_may_have_so_many_bytes(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "RESPONSE_LIMIT", 100)
    assert HttpClient(600.0).send("GET", f"{url}/100") == (200, b"x" * 100)
    with pytest.raises(RetryableError, match="the response has more than 100 bytes"):
        HttpClient(600.0).send("GET", f"{url}/101")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/down", RetryableError, "500 down"),
        ("/busy", RetryableError, "429 busy"),
        ("/missing", RefusedError, "404 no such path"),
        ("/made", RefusedError, "201 made"),
        ("/moved", RefusedError, "302 "),
        ("/html", ValueError, "the response is not JSON: '<html>'"),
        ("/deep", ValueError, "the response is not JSON"),
        ("/many", ValueError, "the response must not have more than 1000000 commas and opening brackets"),
        ("/digits", ValueError, "the response is not JSON: '9999"),
    ],
)
def test_responses_are_sorted_into_retryable_and_refused(url: str, path: str, error: type[Exception], message: str):
    with pytest.raises(error) as raised:
        HttpClient(600.0).post_json(url + path, {})
    assert str(raised.value).startswith(message)


def test_no_connection_is_retryable_and_no_address_refused(url: str):
    with closed_port() as port, pytest.raises(UnreachableError, match="ClientConnectorError"):
        HttpClient(600.0).post_json(f"http://127.0.0.1:{port}", {})
    with pytest.raises(RetryableError, match="SSL") as raised:  # a server that restarts gets no other certificate
        HttpClient(600.0).post_json(url.replace("http:", "https:"), {})
    assert not isinstance(raised.value, UnreachableError)
    with pytest.raises(RefusedError, match="is not an http address"):
        HttpClient(600.0).post_json("file:///etc/passwd", {})


def test_a_body_is_ascii_and_finite(url: str):
    BODIES.clear()
    assert HttpClient(600.0).post_json(f"{url}/ok", {"text": "caf\xe9 \ud800"}) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        HttpClient(600.0).post_json(f"{url}/ok", {"x": float("nan")})
    assert BODIES == [b'{"text": "caf\\u00e9 \\ud800"}']


def test_another_thread_aborts_a_request(url: str):
    client, began = HttpClient(600.0), len(BODIES)

    def abort() -> None:
        while len(BODIES) == began:
            pass
        client.abort()

    threading.Thread(target=abort).start()
    with pytest.raises(ConnectionAbortedError, match="/hangs: the request was aborted"):
        client.send("GET", f"{url}/hangs")
    with pytest.raises(ConnectionAbortedError):
        client.send("GET", f"{url}/ok")


def test_a_proxy_of_the_environment_is_used(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", url)
    assert HttpClient(600.0).send("GET", "http://somewhere.invalid/ok") == (200, b'{"a": 1}')
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert HttpClient(600.0).send("GET", f"{url}/ok") == (200, b'{"a": 1}')


def test_a_response_of_tiny_chunks_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    """Requests of all episodes are sent in one loop. 16,000 chunks were parsed and read in one go."""
    loop, chunks = http.http_loop().loop, [0, 0]  # in all, and without a pause
    parsed = StreamReader.end_http_chunk_receiving

    def counted(reader: StreamReader) -> None:
        parsed(reader)
        if asyncio.get_running_loop() is loop:
            chunks[0], chunks[1] = chunks[0] + 1, chunks[1] + 1
            most.append(chunks[1])
            if chunks[1] == 1:
                loop.call_soon(chunks.__setitem__, 1, 0)

    most: list[int] = []
    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", counted)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as server:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                connection.sendall(head + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")

        served = server.submit(serve)
        status, body = HttpClient(600.0).send("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/")
        served.result()
    assert (status, len(body)) == (200, 40_000)
    assert chunks[0] == 40_001 and max(most) <= 1000  # with the last, empty one


@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
def test_an_error_does_not_repeat_the_token_of_its_request(status: int):
    """A server may. Errors are in the run's folder and on the terminal. The token is longer than what an error shows."""
    token = "sk-" + "0123456789" * 40

    async def repeat(request: web.Request) -> web.Response:
        return web.Response(status=status, text=f"no key: {request.headers['Authorization']}")

    with answering(repeat) as address, pytest.raises((RetryableError, RefusedError, ValueError)) as error:
        HttpClient(600.0, {"Authorization": f"Bearer {token}"}).post_json(address, {})
    assert "no key: Bearer [the key]" in str(error.value) and "0123" not in str(error.value)
