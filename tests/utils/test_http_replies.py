"""A reply has a limit in bytes and a deadline for the whole of it, which a server that drips cannot put off."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import httpx
import pytest

from vlmrl.utils.http import RetryableError, post_json, send_json


def client(content: bytes | Iterator[bytes], timeout: float = 10.0, **headers: str) -> httpx.Client:
    reply = httpx.Response(200, content=content, headers=headers)
    return httpx.Client(transport=httpx.MockTransport(lambda request: reply), timeout=timeout)


def test_a_reply_that_drips_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def drip() -> Iterator[bytes]:
        for _ in range(10):
            now[0] += 4.0
            yield b" "

    with pytest.raises(httpx.ReadTimeout, match="no whole reply in 10 s"):
        send_json(client(drip()), "GET", "http://server/")
    assert now[0] == 112.0


def test_a_reply_may_have_so_many_bytes_after_decompression():
    assert send_json(client(b"x" * 100), "GET", "http://server/", limit=100) == (200, b"x" * 100)
    bomb = gzip.compress(b"x" * 10_000)
    assert len(bomb) < 100
    for content, headers in ((b"x" * 101, {}), (bomb, {"Content-Encoding": "gzip"})):
        with pytest.raises(httpx.ReadError, match="the reply has more than 100 bytes"):
            send_json(client(content, **headers), "GET", "http://server/", limit=100)


def test_such_a_reply_is_retried_as_other_failures_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(send_json, "__defaults__", (None, 100))
    with pytest.raises(RetryableError, match="ReadError: the reply has more than 100 bytes"):
        post_json(client(b"x" * 101), "http://server/", {})


def test_a_reply_that_is_nested_without_end_is_no_json():
    with pytest.raises(ValueError, match="the reply is not JSON"):
        post_json(client(b"[" * 100_000), "http://server/", {})


def test_a_body_is_ascii_and_finite():
    bodies: list[bytes] = []

    def keep(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(200, json={})

    with httpx.Client(transport=httpx.MockTransport(keep)) as http:
        post_json(http, "http://server/", {"text": "caf\xe9 \ud800"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            post_json(http, "http://server/", {"x": float("nan")})
    assert bodies == [b'{"text": "caf\\u00e9 \\ud800"}']
