"""A headless Chromium for tests of pages: Debian's, driven by Playwright as BrowserEnv does, without the network."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vlmrl.env.browser.chromium_process import find_chromium

SECONDS = 300.0  # for an event on a machine that is ten times too slow


def cannot(reason: str) -> NoReturn:
    """Skip the test; fail it with VLMRL_REQUIRE_CHROMIUM, which CI sets, so that it never passes without these tests."""
    if os.environ.get("VLMRL_REQUIRE_CHROMIUM"):
        pytest.fail(reason)
    pytest.skip(reason)


def need_chromium() -> str:
    """The program of Chromium. The test is skipped without it or Playwright, except on CI."""
    if importlib.util.find_spec("playwright") is None:
        cannot("no Playwright: pip install playwright.")
    try:
        return find_chromium(None)
    except ValueError as error:
        cannot(str(error))


class Browser:
    """Opens pages and waits for what they show. ``errors()`` are the messages of the console since the last call."""

    def __init__(self) -> None:
        program = need_chromium()
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._page: Any = self._playwright.chromium.launch(executable_path=program).new_page()
        self._page.set_default_timeout(1000 * SECONDS)
        self._messages: list[str] = []
        self._page.on("console", lambda message: self._messages.append(message.text))
        self._page.on("pageerror", lambda error: self._messages.append(str(error)))

    def open(self, page: Path | str, place: str = "") -> None:
        """Open a file or an address, at a ``place`` behind ``#``, and wait until it is drawn."""
        self.close()
        self._page.goto((page.resolve().as_uri() if isinstance(page, Path) else page) + (f"#{place}" if place else ""))
        self.wait("byId('view').children.length > 0")

    def close(self) -> None:
        """Leave the page, before its server ends."""
        self._page.goto("about:blank")

    def quit(self) -> None:
        self._playwright.stop()

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self._page.evaluate(f"({script})")

    def wait(self, condition: str) -> None:
        """Wait until an expression in the page is true: its elements may be drawn only later.

        A served page forbids the eval of Playwright's own wait.
        """
        end = time.monotonic() + SECONDS
        tried = f"() => {{ try {{ return {condition} }} catch (e) {{ if (e instanceof TypeError) return false; throw e }} }}"
        while not self._page.evaluate(tried):
            assert time.monotonic() < end, f"not true within {SECONDS:.0f} seconds: {condition}"
            self._page.wait_for_timeout(50)

    def press(self, keys: str) -> None:
        """Press keys, where the focus is."""
        self._page.keyboard.type(keys)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of a CSS selector, with a ``text``."""
        self._page.locator(selector, has_text=text).first.click()

    def type(self, selector: str, text: str) -> None:
        self._page.locator(selector).fill(text)

    def hover(self, selector: str) -> None:
        self._page.locator(selector).first.hover()

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a CSS selector."""
        return list(self._page.locator(selector).all_text_contents())

    def size(self, width: int, height: int) -> None:
        self._page.set_viewport_size({"width": width, "height": height})

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as a system's setting."""
        self._page.emulate_media(color_scheme=scheme)

    def errors(self) -> list[str]:
        found, self._messages = self._messages, []
        return found
