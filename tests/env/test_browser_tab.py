"""A tab whose browser is a fake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.env.browser.browser_pool import BrowserFailure, BrowserPool, PoolLimits
from vlmrl.env.browser.browser_tab import BrowserTab, TabKind


async def test_a_request_that_is_blocked_after_the_tab_was_closed_prints_no_traceback():
    """Playwright prints what a route's handler raises, eight lines for each of thousands of requests."""

    async def abort(reason: str) -> Any:
        raise RuntimeError("Target page, context or browser has been closed")

    tab = a_tab(None)
    await tab._block(SimpleNamespace(abort=abort, request=SimpleNamespace(is_navigation_request=lambda: False)))
    assert tab.blocked == 1


class Session:
    """A CDP session: the layout that is asked for makes the page request ``requests``, of which no end comes."""

    def __init__(self, *requests: dict[str, str]) -> None:
        self.requests, self.heard = list(requests), None

    async def send(self, method: str) -> None:
        while self.requests:
            self.heard(self.requests.pop())


def a_tab(page: Any) -> BrowserTab:
    return BrowserTab(TabKind(200, 100), None, page, Session())


async def test_a_request_without_an_end_is_waited_for_once_and_a_workers_script_never(monkeypatch):
    """A page with an event stream, or a long poll, cost two seconds for each action."""
    tab = a_tab(Page(0))
    tab._session.heard, waits = tab._on_request, []

    async def wait(seconds: float) -> None:
        waits.append(set(tab._pending))
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)

    monkeypatch.setattr("vlmrl.env.browser.browser_tab.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(asyncio, "sleep", wait)
    tab._session.requests = [{"requestId": "stream", "loaderId": "7"}, {"requestId": "worker", "loaderId": ""}]
    await tab.screenshot()
    assert waits and all(each == {"stream"} for each in waits)
    waits.clear()
    await tab.screenshot()
    assert not waits


class Page:
    """A page of which Chromium refuses the first ``refused`` screenshots with ``reason``."""

    def __init__(self, refused: int, reason: str = "Unable to capture screenshot") -> None:
        self.refused, self.reason, self.asked = refused, reason, 0

    async def screenshot(self, **options: Any) -> bytes:
        self.asked += 1
        if self.asked <= self.refused:
            raise RuntimeError(f"Page.screenshot: Protocol error (Page.captureScreenshot): {self.reason}")
        return b"png"


async def test_a_screenshot_that_chromium_refuses_is_taken_again():
    """It refuses some on busy machines, without a reason; the episode failed."""
    assert await a_tab(Page(2)).screenshot() == b"png"


@pytest.mark.parametrize(("page", "asked"), [(Page(99), 5), (Page(99, "Cannot take screenshot with 0 width."), 1)])
async def test_a_screenshot_that_cannot_be_taken_is_an_error(page, asked):
    with pytest.raises(RuntimeError, match="captureScreenshot"):
        await a_tab(page).screenshot()
    assert page.asked == asked


async def test_a_call_that_is_given_up_is_not_aborted():
    """Playwright 1.65 may get two answers for a call that it aborts, and raises the second in the next call, of any episode."""
    closed, ended = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        try:
            await closed.wait()
        finally:
            ended.set()
            raise RuntimeError("Target page, context or browser has been closed")

    pool = BrowserPool(PoolLimits("none", 1, 100, timeout=0.01))
    with pytest.raises(BrowserFailure, match=r"act: Chromium took longer than 0\.01 s"):
        await pool._timed(call(), "act")
    assert not ended.is_set()
    closed.set()
    await ended.wait()
    pool.close()
