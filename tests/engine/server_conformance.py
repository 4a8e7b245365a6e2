"""What an engine that starts servers must do besides the cases of `conformance.py`: failures of servers, updates that fail."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from engine.conformance import Case, long_responses
from testing.engine_drivers import ServerDriver

from vlmrl.engine.base import EngineError, Request
from vlmrl.types import Completion


def a_row_of_failures_is_retried(d: ServerDriver) -> None:
    retried = d.engine.retried
    request = d.request("retried", ["red"])
    d.fail(2)
    d.check([request], d.ask(request))
    assert d.engine.retried > retried
    d.fail(0)


def a_dead_server_is_replaced_and_its_requests_are_answered(d: ServerDriver) -> None:
    d.use(d.changed(d.speaking(d.letters()), seed=3))
    answered_in_spite_of(d, signal.SIGKILL)


def a_hung_server_is_replaced_and_its_requests_are_answered(d: ServerDriver) -> None:
    d.use(d.changed(d.speaking(d.letters()), seed=4))
    d.set(health_timeout=d.hang_seconds)
    answered_in_spite_of(d, signal.SIGSTOP)


def answered_in_spite_of(d: ServerDriver, number: signal.Signals) -> None:
    """On a slow machine, servers that are not struck may be replaced, too."""
    first = d.process_groups[0]

    async def strike() -> tuple[list[Request], list[Completion]]:
        requests, tasks = await long_responses(d)
        d.signal(number)
        responses = list(await asyncio.gather(*tasks))
        await d.until_replaced(first)
        await d.until_all_serve()
        return requests, responses

    requests, responses = d.wait(strike())
    d.check(requests, responses)
    request = d.request("each", ["red", "green"])
    responses = d.ask_each_server(request)
    d.check([request] * len(responses), responses)


def a_server_that_was_dead_in_an_update_has_the_new_weights(d: ServerDriver) -> None:
    d.signal(signal.SIGKILL)
    d.use(d.changed(d.sharp, seed=5))
    d.wait(d.until_all_serve())
    request = d.request("each", ["red", "green"])
    responses = d.ask_each_server(request)
    d.check([request] * len(responses), responses)


def a_wrong_update_is_refused_and_the_next_one_arrives(d: ServerDriver) -> None:
    request = d.request("wrong", ["red"])
    d.ask(request)
    wrong = {"model.language_model.norm.weight": torch.zeros(3)}
    push = d.push_weights(lambda: iter(wrong.items()), d.version)
    if d.refuses_wrong_weights:
        with pytest.raises(EngineError, match="refused"):
            d.wait(push)
    else:
        d.wait(push)
        assert d.pool.ready == []  # they died of it, and do not serve before they have others
    d.use(d.changed(d.sharp, seed=6))
    d.wait(d.until_all_serve())
    d.check([request], d.ask(request))


def an_aborted_update_leaves_the_engine_usable(d: ServerDriver) -> None:
    request = d.request("aborted", ["red"])
    d.ask(request)
    begun, given_up = threading.Event(), threading.Event()

    def slow() -> Any:
        items = list(d.changed(d.sharp, seed=7).items())
        yield from items[:-1]
        begun.set()
        given_up.wait(600)
        yield items[-1]

    async def abort() -> None:
        push = asyncio.create_task(d.push_weights(slow, d.version))
        await asyncio.to_thread(begun.wait, 600)
        push.cancel()
        with suppress(asyncio.CancelledError):
            await push
        given_up.set()

    d.wait(abort())
    d.use(d.changed(d.sharp, seed=8))
    d.check([request], d.ask(request))


SERVER_CASES: list[Case] = [
    a_row_of_failures_is_retried,
    a_wrong_update_is_refused_and_the_next_one_arrives,
    an_aborted_update_leaves_the_engine_usable,
    a_dead_server_is_replaced_and_its_requests_are_answered,
    a_hung_server_is_replaced_and_its_requests_are_answered,
    a_server_that_was_dead_in_an_update_has_the_new_weights,
]
"""For engines that start servers."""
