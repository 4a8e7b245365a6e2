"""A gateway for tests: episodes behind the real server, with the run's event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

from vlmrl.config import Gateway
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.gateway_server import GatewayServer
from vlmrl.utils.threads import LoopThread

PATIENCE = 600.0  # seconds; no test waits for it
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Served:
    """A server, the client of each episode, and the loop that the episodes live on."""

    server: GatewayServer
    clients: list[AgentClient]
    run_loop: LoopThread

    @property
    def client(self) -> AgentClient:
        return self.clients[0]

    def post(self, path: str = "/v1/chat/completions", body: Any = HELLO, client: AgentClient | None = None, **options):
        """The response to one request; ``body`` is sent as it is if it is bytes or an iterator of bytes."""
        client = client or self.client
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"authorization": f"Bearer {client.api_key}"} | options.pop("headers", {})
        return httpx.post(client.url + path, content=content, headers=headers, timeout=PATIENCE, **options)

    def connect(self) -> socket.socket:
        host, _, port = self.client.url.split("/")[2].partition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def head(self, length: int, path: str = "/v1/chat/completions") -> bytes:
        """The first line and headers of a request."""
        target = "/" + self.client.url.split("/", 3)[3] + path
        return (
            f"POST {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.client.api_key}\r\n"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


@contextmanager
def serving(*episodes: Any, settings: Gateway | None = None, **limits: Any) -> Iterator[Served]:
    run_loop = LoopThread("run-of-tests")
    server = GatewayServer(settings or Gateway(), **limits)
    try:
        clients = [run_loop.wait(server.open(episode), PATIENCE) for episode in episodes]
        yield Served(server, clients, run_loop)
    finally:
        server.close()
        run_loop.close()


def turns_of(served: Served, episode: Any) -> list[Any]:
    """The turns of an episode, which it ends."""

    async def finish() -> None:
        episode.finish()

    served.run_loop.wait(finish(), PATIENCE)
    return episode.trajectory.turns


def png(color: str = "red", size: tuple[int, int] = (64, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format="PNG")
    return buffer.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


class Gate:
    """A response of an engine that waits until it is let through; ``began`` and ``ended`` count."""

    def __init__(self, text: str = "four") -> None:
        self.text = text
        self.began = 0
        self.cancelled = 0
        self._open = asyncio.Event()
        self._changed = asyncio.Condition()

    async def __call__(self, request: Any, turn: int) -> str:
        await self._count("began")
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            await self._count("cancelled")
            raise
        return self.text

    async def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)
        async with self._changed:
            self._changed.notify_all()

    async def reached(self, name: str, count: int = 1) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: getattr(self, name) >= count)

    async def open(self) -> None:
        self._open.set()
