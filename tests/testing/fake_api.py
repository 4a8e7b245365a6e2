"""An OpenAI-compatible chat API for tests, which can fail in the ways that real ones do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from testing.servers import served

Respond = Callable[[dict[str, Any]], dict[str, Any]]
GARBAGE = {
    "garbage": b"<html>Bad gateway</html>",
    "no choices": b'{"choices": []}',
    "no message": b'{"choices": [{"finish_reason": "stop"}]}',
    "surrogate": b'{"choices": [{"message": {"content": "\\ud800"}}]}',
}
"""Bodies with status 200 that are no chat completion."""


class FakeApi:
    """``requests`` are the bodies that were received, ``answered`` how many of them got a whole response.

    ``faults`` are used up one for each request: ``hang``, ``cut``, ``500``, ``429``, a key of GARBAGE, or ``""`` for none.
    """

    def __init__(self, respond: Respond, faults: Sequence[str] = ()) -> None:
        self.respond = respond
        self.faults = list(faults)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered = 0
        self.in_flight = self.most_in_flight = 0
        self.together = 1
        """The first responses wait until so many requests are in flight."""
        self._met = asyncio.Event()
        self.tokens = (10, 2)
        """Of each prompt and response."""
        self.on_hang: Callable[[], None] = lambda: None
        """Called when a request is not answered."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.together:
            self._met.set()
        try:
            await self._met.wait()
            return await self._answer(request, body)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "hang":
            self.on_hang()
            await asyncio.sleep(3600)
        if fault in GARBAGE:
            return web.Response(body=GARBAGE[fault])
        if fault == "429":
            return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0.2"})
        if fault.isdigit():
            return web.json_response({"error": {"message": f"fault {fault}"}}, status=int(fault))
        content = json.dumps(self._completion(body)).encode()
        if fault == "cut":
            response = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        self.answered += 1
        return web.Response(body=content, content_type="application/json")

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        message = self.respond(body)
        reason = message.pop("finish_reason", "tool_calls" if "tool_calls" in message else "stop")
        prompt, response = self.tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": response}
        return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}


@contextmanager
def fake_api(respond: Respond, faults: Sequence[str] = ()) -> Iterator[tuple[FakeApi, str]]:
    """The API and its base URL."""
    api = FakeApi(respond, faults)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", api.handle)
    with served(app, is_guarded=False) as url:
        yield api, f"{url}/v1"


def says(*texts: str) -> Respond:
    """Responses by turn: the first text, then the second one. The turn is the number of earlier responses in the request."""

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return {"role": "assistant", "content": texts[min(turn, len(texts) - 1)]}

    return respond


def call(name: str, arguments: str, id: str = "c1") -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
