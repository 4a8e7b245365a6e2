"""Servers for tests: an app in a thread, on a free port of the loopback address, stopped when the test ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from vlmrl.utils.http_server import ServerThread, free_ports, guarded, open_port


def free_port() -> int:
    return free_ports(1)[0]


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so that nobody else gets it, and nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def served(
    app: web.Application, port: int = 0, token: str | None = None, max_body: int = 2**26, is_guarded: bool = True
) -> Iterator[str]:
    """Serve an app, guarded if it has no guard yet; the value is its address."""
    if is_guarded and not app.middlewares:
        guarded(app, token, max_body)
    listener = open_port("127.0.0.1", port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = ServerThread(app, listener, "served")
    try:
        yield address
    finally:
        server.close()


@contextmanager
def answering(handler: Handler) -> Iterator[str]:
    """A server that answers all requests as ``handler`` does."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    with served(app, is_guarded=False) as url:
        yield url


def asked(app: web.Application, *requests: tuple[str, str, bytes]) -> list[httpx.Response]:
    """The responses to requests (method, path, body), one after another."""
    with served(app) as url, httpx.Client(base_url=url, timeout=600) as http:
        return [http.request(method, path, content=content) for method, path, content in requests]


@contextmanager
def served_asgi(app: Any) -> Iterator[str]:
    """Serve an ASGI app of another package; the value is its address."""
    uvicorn = pytest.importorskip("uvicorn")
    listener = open_port("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(600)
        assert not thread.is_alive()
