"""Images at http addresses: what is tried again, how long, and how much is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from vlmrl.multimodal import fetch as fetching
from vlmrl.multimodal.fetch import fetch, new_client
from vlmrl.utils.http import RefusedError, RetryableError

Answer = httpx.Response | Exception


def fetched(answer: Callable[[int], Answer], seconds: float = 60.0) -> tuple[bytes | str, int]:
    """The body, or the error's name and text, and the number of requests. ``answer`` gets the number of the request, from 1."""
    requests: list[httpx.Request] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        given = answer(len(requests))
        if isinstance(given, Exception):
            raise given
        return given

    async def main() -> bytes | str:
        async with asyncio.timeout(60), new_client(httpx.MockTransport(handle)) as client:
            try:
                return await fetch("http://images.test/a.png", seconds, client)
            except (RetryableError, RefusedError) as error:
                return f"{type(error).__name__}: {error}"

    return asyncio.run(main()), len(requests)


class Body(httpx.AsyncByteStream):
    """Chunks, then nothing for ever if ``hangs``."""

    def __init__(self, chunks: list[bytes], hangs: bool = False) -> None:
        self.chunks, self.hangs, self.read = chunks, hangs, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.read += 1
            yield chunk
        if self.hangs:
            await asyncio.Event().wait()


def ok(content: bytes) -> httpx.Response:
    return httpx.Response(200, stream=Body([content]))


@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(503),
        httpx.Response(429),
        httpx.Response(500),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("the body ended early"),
    ],
    ids=lambda failure: str(getattr(failure, "status_code", type(failure).__name__)),
)
def test_a_failure_that_may_pass_is_tried_again(failure: Answer):
    assert fetched(lambda number: failure if number == 1 else ok(b"png")) == (b"png", 2)


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (httpx.Response(404), "RefusedError: 404 Not Found"),
        (httpx.Response(403), "RefusedError: 403 Forbidden"),
        (httpx.Response(204), "RefusedError: 204 No Content"),
        (httpx.UnsupportedProtocol("no host"), "RefusedError: UnsupportedProtocol: no host"),
        (httpx.TooManyRedirects("round and round"), "RefusedError: TooManyRedirects: round and round"),
        (
            httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=Body([b"x"])),
            "RefusedError: its body has the encoding gzip, which was not requested",
        ),
    ],
)
def test_a_failure_that_will_stay_is_not_tried_again(failure: Answer, named: str):
    assert fetched(lambda number: failure) == (named, 1)


def test_attempts_are_limited_and_the_last_failure_is_named(monkeypatch):
    monkeypatch.setattr(fetching, "ATTEMPTS", 3)
    assert fetched(lambda number: httpx.Response(503)) == ("RetryableError: 503 Service Unavailable (3 attempts)", 3)


@pytest.mark.parametrize("chunks", [[], [b"x"]], ids=["nothing", "a drip"])
def test_all_attempts_together_have_a_deadline(chunks: list[bytes]):
    error, requests = fetched(lambda number: httpx.Response(200, stream=Body(chunks, hangs=True)), seconds=0.05)
    assert (error, requests) == ("RetryableError: no whole reply within 0.05 s", 1)


def test_the_deadline_names_the_last_failure():
    answers = [httpx.Response(503), httpx.Response(200, stream=Body([], hangs=True))]
    error, requests = fetched(lambda number: answers[number - 1], seconds=1.0)  # the pause is at most 0.25 s
    assert (error, requests) == (
        "RetryableError: no whole reply within 1 s; the last of 1 failures was 503 Service Unavailable",
        2,
    )


def test_a_body_over_the_limit_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(fetching, "MAX_BYTES", 250)
    declared = Body([b"x" * 100] * 3)
    response = httpx.Response(200, headers={"Content-Length": "300"}, stream=declared)
    assert fetched(lambda number: response) == ("RefusedError: its body has 300 bytes, more than 250", 1)
    assert declared.read == 0
    endless = Body([b"x" * 100] * 1000)
    assert fetched(lambda number: httpx.Response(200, stream=endless)) == (
        "RefusedError: its body has more than 250 bytes",
        1,
    )
    assert endless.read == 3
    assert fetched(lambda number: ok(b"x" * 250)) == (b"x" * 250, 1)


def test_a_redirect_is_followed_to_http_addresses_only():
    moved = httpx.Response(302, headers={"Location": "http://other.test/b.png"})
    assert fetched(lambda number: moved if number == 1 else ok(b"png")) == (b"png", 2)
    local = httpx.Response(302, headers={"Location": "file:///etc/passwd"})
    error, _ = fetched(lambda number: local if number == 1 else httpx.UnsupportedProtocol("file"))
    assert str(error).startswith("RefusedError: UnsupportedProtocol")
