"""Retries against a clock that only pauses move: no test waits."""

import httpx
import pytest

from vlmrl.utils import http
from vlmrl.utils.http import RefusedError, RetryableError, http_client, post_json, retrying


class Clock:
    """Time in seconds, which passes only in ``sleep``."""

    def __init__(self):
        self.now, self.pauses = 100.0, []

    def sleep(self, seconds):
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    """tenacity's clock, with the longest pauses that the jitter allows."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    monkeypatch.setattr(http.random, "uniform", lambda low, high: high)
    return clock


def attempt(retry, clock, failures):
    """The number of calls until a function that fails so often succeeds, or its last error."""
    calls = []

    def call():
        calls.append(clock.now)
        if len(calls) <= failures:
            raise RetryableError(f"failure {len(calls)}")
        return len(calls)

    retry.sleep = clock.sleep
    try:
        return retry(call)
    except RetryableError as error:
        return str(error)


def test_attempts_are_counted_and_pauses_double(clock):
    assert attempt(retrying(attempts=5), clock, failures=4) == 5
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0]
    assert attempt(retrying(attempts=5), clock, failures=5) == "failure 5"
    assert attempt(retrying(attempts=1), clock, failures=1) == "failure 1"


def test_pauses_stay_below_the_longest_and_end_within_the_patience(clock):
    assert attempt(retrying(patience=30.0, longest_pause=5.0), clock, failures=99) == "failure 10"
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]  # 27.75 s; another 5 would exceed 30


def test_jitter_shortens_a_pause_by_at_most_half(clock, monkeypatch):
    monkeypatch.setattr(http.random, "uniform", lambda low, high: low)
    assert attempt(retrying(attempts=3), clock, failures=2) == 3
    assert clock.pauses == [0.125, 0.25]


def test_other_errors_are_raised_at_once(clock):
    def refuse():
        raise RefusedError("401")

    with pytest.raises(RefusedError):
        retrying(attempts=3)(refuse)
    assert clock.pauses == []


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(500, text="down"), RetryableError("500 down")),
        (httpx.Response(429, text="busy"), RetryableError("429 busy")),
        (httpx.Response(404, text="no such path"), RefusedError("404 no such path")),
        (httpx.Response(201, text="made"), RefusedError("201 made")),
        (httpx.Response(200, text="<html>"), ValueError("the reply is not JSON: '<html>'")),
        (httpx.ReadTimeout("late"), RetryableError("ReadTimeout: late")),
        (httpx.ConnectError("refused"), RetryableError("ConnectError: refused")),
    ],
)
def test_replies_are_sorted_into_retryable_and_refused(response, error):
    def answer(request):
        if isinstance(response, Exception):
            raise response
        return response

    client = httpx.Client(transport=httpx.MockTransport(answer))
    with pytest.raises(type(error)) as raised:
        post_json(client, "http://x", {})
    assert str(raised.value) == str(error)


def test_a_client_has_its_timeout_and_headers():
    client = http_client(2.5, {"Authorization": "Bearer x"})
    assert client.timeout == httpx.Timeout(2.5) and client.headers["authorization"] == "Bearer x"
