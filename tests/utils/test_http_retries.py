"""Retries against a clock that only pauses move: no test waits."""

import pytest

from vlmrl.utils import http
from vlmrl.utils.http import RefusedError, RetryableError, retrying


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


def test_a_pause_that_the_server_asks_for_is_kept(clock):
    waits = iter([7.0, 0.0, 90.0])

    def call():
        raise RetryableError("busy", next(waits))

    retry = retrying(patience=60.0)
    retry.sleep = clock.sleep
    with pytest.raises(RetryableError) as raised:
        retry(call)
    assert clock.pauses == [7.0, 0.5] and raised.value.after == 90.0  # which would exceed the patience
