"""Many threads that request one value: it is computed once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vlmrl.utils.threads import SingleFlight


def test_threads_share_one_computation_and_then_the_stored_value():
    flight, stored, started, go = SingleFlight(), {}, threading.Event(), threading.Event()
    calls = []

    def make():
        calls.append(threading.current_thread())
        started.set()
        assert go.wait(600)
        stored["a"] = 7
        return 7

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(flight.get, "a", stored.get, make)
        assert started.wait(600)
        others = [threads.submit(flight.get, "a", stored.get, make) for _ in range(3)]
        assert flight.get("b", stored.get, lambda: 8) == (8, True)  # another key does not wait
        go.set()
        assert first.result(20) == (7, True)
        assert [other.result(20) for other in others] == [(7, False)] * 3
    assert len(calls) == 1 and flight.get("a", stored.get, make) == (7, False)


def test_an_error_reaches_all_who_wait_and_the_next_call_tries_again():
    flight, started, go = SingleFlight(), threading.Event(), threading.Event()

    def fail():
        started.set()
        assert go.wait(600)
        raise OSError("gone")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(flight.get, "a", {}.get, fail)
        assert started.wait(600)
        with flight._lock:
            pending = flight._pending["a"]
        go.set()
        assert isinstance(first.exception(20), OSError) and pending.exception(20) is first.exception()
    with pytest.raises(OSError, match="gone"):
        flight.get("a", {}.get, fail)
    assert flight.get("a", {}.get, lambda: 1) == (1, True)
