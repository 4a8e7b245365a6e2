"""A user's coroutines: awaited so that they hold up nobody, and closed where the wait for them was cancelled before they began.

Python warns of a coroutine that nobody awaited.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vlmrl.utils.threads import await_user_code
from vlmrl.utils.work_pool import abandonable


@dataclass(frozen=True)
class AwaitedThen:
    """``await AwaitedThen(value, then)``: awaits ``value``, then ``then`` of its result, then what that returned."""

    value: Awaitable[Any]
    then: Callable[[Any], Awaitable[Any]]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        return await await_result(await self.then(await await_result(self.value)))


async def await_result(value: Any) -> Any:
    """``value``, awaited if it can be: see :func:`await_user_code`. Cancellation does not wait for it: it may ignore that."""
    if not inspect.isawaitable(value):
        return value
    try:
        return await abandonable(await_user_code(value))
    except asyncio.CancelledError:
        _close(value)
        raise


def close_result(call: Future[Any]) -> None:
    """Close the coroutine that ``call`` returned, if it did: for a call that nobody waits for any more."""
    if call.exception() is None:
        _close(call.result())


def _close(value: Any) -> None:
    while isinstance(value, AwaitedThen):
        value = value.value
    if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        value.close()
