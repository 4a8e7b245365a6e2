"""What an inference server may send that is no HTTP, or no end of it: each call fails as an unreached or a failed server does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from vlmrl.config import ServerSettings
from vlmrl.engine.server import UNREACHED, Server, ServerError
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.utils import http

pytestmark = pytest.mark.slow

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FAILURES = (*UNREACHED, ServerError)


async def failure_of(sent: Iterable[bytes], *, ends: bool = True, timeout: float = 600.0) -> Exception:
    """How a call fails whose response is ``sent``. With ``ends`` the connection is closed behind it, else it stays open."""
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

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = ServerPool(SGLangBackend(ServerSettings(urls=(url,))), [])
    await pool.start()
    try:
        with pytest.raises(FAILURES) as failure:
            await pool.call(Server(url), "/generate", {"text": "x"}, timeout)
        return failure.value
    finally:
        done.set()
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
