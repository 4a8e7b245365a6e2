"""One HTTP request of an agent and its response, in the form of the API that was called; `gateway_app.py` serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from vlmrl.gateway import anthropic_api, openai_api, openai_responses_api
from vlmrl.gateway.chat import ChatError, ChatResponse
from vlmrl.gateway.request_body import ParsedRequest
from vlmrl.gateway.request_images import RequestImages

STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class ChatApi(NamedTuple):
    """One HTTP format of requests and responses."""

    read: Callable[[dict[str, Any], RequestImages], ParsedRequest]
    response: Callable[[ParsedRequest, ChatResponse], dict[str, Any]]
    stream: Callable[[ParsedRequest, ChatResponse], Iterator[bytes]]
    error: Callable[[ChatError], dict[str, Any]]
    error_event: Callable[[ChatError], bytes]
    heartbeat: bytes


OPENAI = ChatApi(
    openai_api.read_openai_request,
    openai_api.openai_response,
    openai_api.openai_stream,
    openai_api.openai_error,
    openai_api.openai_error_event,
    b": heartbeat\n\n",
)
RESPONSES = ChatApi(
    openai_responses_api.read_responses_request,
    openai_responses_api.responses_response,
    openai_responses_api.responses_stream,
    openai_api.openai_error,
    openai_responses_api.responses_error_event,
    OPENAI.heartbeat,
)
ANTHROPIC = ChatApi(
    anthropic_api.read_anthropic_request,
    anthropic_api.anthropic_response,
    anthropic_api.anthropic_stream,
    anthropic_api.anthropic_error,
    anthropic_api.anthropic_error_event,
    anthropic_api.PING,
)


class ClientLeftError(Exception):
    """Nobody reads the response."""


class Exchange:
    """A request and its response. ``held`` bytes of memory count for it until it is rendered."""

    def __init__(self, request: web.Request, write_seconds: float) -> None:
        self.request = request
        self.api = api_of(request)
        self.held = 0
        self.response: web.StreamResponse | None = None
        """The response, when it has begun."""
        self._write_seconds = write_seconds

    async def json(self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """All of a JSON response. As :meth:`end`."""
        self.response = web.json_response(body, status=status, headers=headers)
        if not self.request.content.is_eof():
            self.response.force_close()
        await self._send(self.response.prepare(self.request))
        await self.end()

    async def events(self, content: bytes) -> None:
        """A part of a stream, which it begins if need be."""
        if self.response is None:
            self.response = web.StreamResponse(headers=STREAM_HEADERS)
            await self._send(self.response.prepare(self.request))
        await self._send(self.response.write(content))

    async def error(self, error: ChatError, headers: Mapping[str, str] | None = None) -> None:
        """An error, in a stream that has begun or as the whole response."""
        if self.response is None:
            await self.json(error.status, self.api.error(error), headers)
        elif isinstance(self.response, web.Response):  # JSON, of which a part is sent
            self._abort()
        else:
            await self.events(self.api.error_event(error))
            await self.end()

    async def end(self) -> None:
        """End the response, and wait until the client has read all but what fits into the connection's buffers.

        Raises ClientLeftError if it does not.
        """
        assert self.response is not None
        await self._send(self.response.write_eof())

    async def _send(self, part: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await part
        except (ConnectionError, TimeoutError):
            self._abort()
            raise ClientLeftError from None

    def _abort(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


def api_of(request: web.Request) -> ChatApi:
    if "/messages" in request.path or "anthropic-version" in request.headers:
        return ANTHROPIC
    return RESPONSES if request.path.endswith("/responses") else OPENAI
