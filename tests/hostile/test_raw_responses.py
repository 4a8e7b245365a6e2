"""What an inference server may send that is no HTTP, or no end of it: each call fails as an unreached or a failed server does."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace

import pytest

from vlmrl.config import ServerSettings
from vlmrl.engine.server import UNREACHED, Server, ServerError
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.utils import http
from vlmrl.utils.http import HttpClient, RetryableError
from vlmrl.utils.tokens import bearer

pytestmark = pytest.mark.slow

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FAILURES = (*UNREACHED, ServerError, RetryableError)
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


TOKEN = "0123456789abcdef" * 2


async def failure_of(
    sent: Iterable[bytes], *, ends: bool = True, timeout: float = 600.0, client: bool = False
) -> Exception:
    """How a call fails whose response is ``sent``. With ``ends`` the connection is closed behind it, else it stays open.

    With ``client``, a request of an :class:`HttpClient`.
    """
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            for part in sent:
                writer.write(part)
                await writer.drain()
            if not ends:
                await done.wait()
        except ConnectionError:
            pass
        finally:
            writer.close()

    try:
        with pytest.raises(FAILURES) as failure:
            await _call(answer, timeout, client)
        return failure.value
    finally:
        done.set()


async def _call(answer: Answer, timeout: float = 600.0, client: bool = False) -> object:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = ServerPool(SGLangBackend(ServerSettings(urls=(url,))), [])
    await pool.start()
    try:
        if client:
            return await asyncio.to_thread(HttpClient(timeout, bearer(TOKEN)).post_json, url, {"text": "x"})
        return await pool.call(Server(url, token=TOKEN), "/generate", {"text": "x"}, timeout)
    finally:
        await pool.close()
        server.close()


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"\x00\xff\x80\r\n\r\n"],
        [b'{"output_ids": []}'],
        [HEAD + b'Content-Length: 1000\r\n\r\n{"output'],
        [HEAD + b"Content-Length: -5\r\n\r\n{}"],
        [HEAD + b"Content-Length: 2\r\nContent-Length: 20\r\n\r\n{}"],
        [HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
        [CHUNKED + b"f" * 40 + b"\r\n{}"],
        [CHUNKED + b"2\r\n{}\r\n"],
        [b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"],
        [b"HTTP/1.1 307 T\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"],
        itertools.chain([HEAD + b"X: "], itertools.repeat(b"a" * 65536)),
        itertools.chain([HEAD], itertools.repeat(b"X: a\r\n" * 1000)),
        itertools.chain([CHUNKED + b"2\r\n{}\r\n0\r\n"], itertools.repeat(b"X: a\r\n" * 1000)),
    ],
)
async def test_a_response_that_is_no_http_fails_the_call_at_once(sent):
    assert not isinstance(await failure_of(sent), TimeoutError)


@pytest.mark.parametrize(
    "sent",
    [
        [HEAD + b"X: a"],
        [HEAD + b"Content-Length: 9\r\n\r\n{"],
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 1000],
        itertools.chain([CHUNKED], itertools.repeat(b"1\r\n \r\n" * 1000)),
    ],
)
async def test_a_response_without_an_end_fails_the_call_at_its_time_limit(sent):
    assert isinstance(await failure_of(sent, ends=False, timeout=0.3), TimeoutError)


@pytest.mark.parametrize(
    "sent",
    [
        [TOKEN.encode() + b"\r\n\r\n"],
        [HEAD + b"a b: " + TOKEN.encode() + b"\r\n\r\n"],
        [HEAD + b"X: " + TOKEN.encode() + b"\r\n"],
        [CHUNKED + TOKEN.encode() + b"\r\n"],
        [HEAD + b"X: " + b"a" * 70 + (TOKEN.encode() * 300)],
    ],
)
async def test_the_error_of_a_response_that_is_no_http_does_not_quote_it(sent):
    """It may have the token of its request. `crash.txt` has the errors with their causes."""
    for failure in (await failure_of(sent), await failure_of(sent, client=True)):
        assert TOKEN[:12] not in "".join(traceback.format_exception(failure))


async def test_a_connection_that_is_lost_at_a_malformed_chunk_fails_the_call(monkeypatch):
    """aiohttp raises an error of no kind of its own if nobody waited for the chunk: it ended the run."""
    first, lost = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        first.set()
        await lost.wait()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"2\r\n{}\r\n")
        await first.wait()
        writer.write(b"no size\r\n")
        await reader.read()
        lost.set()
        writer.close()

    monkeypatch.setattr(http, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    with pytest.raises(FAILURES, match="the connection was lost"):
        await _call(answer)


async def test_no_request_is_sent_over_a_connection_that_its_server_may_close(monkeypatch):
    """As vLLM closes one that was idle for 5 s, just when the next request arrives: its server was taken out of service."""
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.01)

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        await reader.read(1)  # of another request, or the end
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    one = Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pool = ServerPool(SGLangBackend(ServerSettings(urls=("http://unused",))), [])
    await pool.start()
    try:
        for _ in range(2):
            assert await pool.call(one, "/pause", {}, 600.0) == {}
            await asyncio.sleep(0.05)
    finally:
        await pool.close()
        server.close()
