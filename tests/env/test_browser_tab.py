"""A tab whose browser is a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlmrl.env.browser.browser_tab import BrowserTab, TabKind


async def test_a_request_that_is_blocked_after_the_tab_was_closed_prints_no_traceback():
    """Playwright prints what a route's handler raises, eight lines for each of thousands of requests."""

    async def abort(reason: str) -> Any:
        raise RuntimeError("Target page, context or browser has been closed")

    tab = BrowserTab(TabKind(200, 100), None, None)
    await tab._block(SimpleNamespace(abort=abort, request=SimpleNamespace(is_navigation_request=lambda: False)))
    assert tab.blocked == 1
