"""One page of a browser, used by one episode at a time: open, look, act. Its methods run in the browser pool's loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.env.browser.chromium_process import read_error
from vlmrl.env.browser.computer_use import CLICKS, Action, Point

HERE = Path(__file__).parent
DEAD_PROXY = "http://127.0.0.1:9"  # of every context: what is not intercepted reaches nothing
MAX_DIALOGS = 10  # of one observation; later ones are dismissed, which ends `while (confirm(...))`
MOST_DIALOGS = 100  # of one observation; a page with more of them waits for an answer until the call's deadline
ERROR_PAGE = "chrome-error:"
"""After a dead link, and where the page's own server redirects to an address that is blocked."""
SETTLE_SECONDS = 3.0  # for requests of the page after an action, and for one request: a stream's has no end
FORGET_HISTORY = "Page.resetNavigationHistory"
NO_BODIES = {"maxTotalBufferSize": 0, "maxResourceBufferSize": 0}  # Chromium keeps none for us
CAPTURES = 5  # of one screenshot: Chromium refuses some without a reason and gives the same ones 0.1 s later


def without_query(url: str) -> str:
    return url.partition("?")[0]


@cache
def script(name: str) -> str:
    return (HERE / name).read_text()


@dataclass(frozen=True)
class TabKind:
    """What a tab is made for: its size in CSS pixels, the screenshot's pixels for each of them, the server that it may reach."""

    width: int
    height: int
    scale: float = 1.0
    server: str = ""  # host:port; empty: files only


class BrowserTab:
    """A context of a browser with one page. Page time passes only with :meth:`advance`.

    ``blocked`` counts requests to anywhere but the page's own place, which are refused.
    """

    def __init__(self, kind: TabKind, context: Any, page: Any, session: Any) -> None:
        self.kind = kind
        self.episodes = 0
        self.blocked = 0
        self.dialogs: list[str] = []
        self._dialogs_shown = 0  # since the last observation
        self._context = context
        self._page = page
        self._pointer = (kind.width / 2, kind.height / 2)
        self._place = ""
        self._loaded = ""  # the address, as the page has it, of what `open` has loaded
        self._session = session  # of the Chrome DevTools protocol
        self._pending: dict[str, float] = {}  # requests that have neither ended nor failed, and when they began

    @classmethod
    async def new(cls, handle: Any, kind: TabKind, seconds: float) -> BrowserTab:
        """A tab in a new context of the Playwright browser ``handle``, whose calls take at most ``seconds``."""
        context = await handle.new_context(
            viewport={"width": kind.width, "height": kind.height},
            device_scale_factor=kind.scale,
            accept_downloads=False,
            service_workers="block",
            proxy={"server": DEAD_PROXY, "bypass": kind.server},
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        try:
            context.set_default_timeout(seconds * 1000)
            for name in ("page_clock.js", "page_clipboard.js", "page_console.js"):
                await context.add_init_script(script(name))
            # Chromium lets a page without a history close its tab.
            await context.add_init_script("window.close = () => {}")
            page = await context.new_page()
            session = await context.new_cdp_session(page)
            await session.send("Network.enable", NO_BODIES)
        except BaseException:
            await context.close()
            raise
        tab = cls(kind, context, page, session)
        page.on("dialog", tab._on_dialog)
        context.on("page", tab._on_popup)
        # Playwright's own event of a request comes later, once it is intercepted: screenshots lacked images that styles name.
        session.on("Network.requestWillBeSent", tab._on_request)
        for ended in ("Network.loadingFinished", "Network.loadingFailed"):
            session.on(ended, lambda event: tab._pending.pop(event["requestId"], None))
        return tab

    async def open(self, url: str, seed: int, place: str, reload: bool) -> None:
        """Load ``url`` as if nothing had been loaded before. Only addresses that begin with ``place`` are reached.

        Without ``reload``, a page that is loaded already stays, with page time 0 and the random numbers of ``seed``.
        """
        if place != self._place:
            await self._context.unroute_all()
            allowed = re.compile(f"^(?!{re.escape(place)}|data:|blob:|about:)")
            await self._context.route(allowed, self._block)
            self._place = place
        self.episodes += 1
        self.blocked = 0
        self.take_dialogs()
        self._pending.clear()
        await self._page.mouse.move(-1, -1)  # or the last episode's pointer would hover over the new page
        if reload or self._page.url != self._loaded or without_query(url) != without_query(self._loaded):
            await self._page.goto(url, wait_until="load")
            self._loaded = self._page.url
        else:
            await self.evaluate("(seed) => void window.vlmrlRestart(seed)", seed)
        # `history.back()` would lead to a blank page, or to one of the tab's earlier episodes.
        await self._session.send(FORGET_HISTORY)
        self._pointer = (self.kind.width / 2, self.kind.height / 2)

    async def advance(self, seconds: float) -> None:
        """Let page time pass in all frames, then wait until what the page requested is loaded, for some seconds at most."""
        await self.evaluate("0")  # a click's navigation has begun
        await self._page.wait_for_load_state("load")
        for frame in self._page.frames:
            if frame.url.startswith("about:blank#"):
                continue  # an evaluation there never ends: Playwright does not see that such a document has loaded
            passing = self._evaluate(frame, "async (time) => void (await window.vlmrlAdvance?.(time))", 1000 * seconds)
            if frame.url:
                await passing
                continue
            # Nor where Chromium refuses the address, such as view-source:. A call that is cancelled may fail one of another episode.
            given_up = asyncio.ensure_future(passing)
            given_up.add_done_callback(read_error)
            await asyncio.wait([given_up], timeout=SETTLE_SECONDS)
        await self._page.wait_for_load_state("load")
        await self._settle()
        if self._page.url.startswith(ERROR_PAGE):
            await self._page.go_back()
        if self._page.url.startswith(ERROR_PAGE):  # it took the place of the episode's first page
            await self._page.goto(self._loaded)
            await self._session.send(FORGET_HISTORY)

    async def _settle(self) -> None:
        """Wait until what the page requested within the last seconds is loaded, for at most as long."""
        await self._session.send("Page.getLayoutMetrics")  # the layout requests the images that styles name
        until = time.monotonic() + SETTLE_SECONDS
        while (now := time.monotonic()) < until and any(
            now - begun < SETTLE_SECONDS for begun in self._pending.values()
        ):
            await asyncio.sleep(0.005)

    async def evaluate(self, expression: str, argument: Any = None) -> Any:
        return await self._evaluate(self._page, expression, argument)

    async def _evaluate(self, frame: Any, expression: str, argument: Any) -> Any:
        """The value in the new document, if the page navigated during the evaluation."""
        for last in (False, False, True):
            try:
                return await frame.evaluate(expression, argument)
            except Exception as error:
                if last or "context was destroyed" not in str(error):
                    if frame is not self._page and frame not in self._page.frames:
                        return None  # the frame was removed
                    raise
                await self._page.wait_for_load_state("load")
        raise AssertionError("unreachable")

    async def screenshot(self) -> bytes:
        """The page as PNG, without a blinking caret and with animations at their end."""
        await self._settle()
        for capture in range(1, CAPTURES + 1):
            try:
                png: bytes = await self._page.screenshot(animations="disabled", caret="hide", scale="device")
                return png
            except Exception as error:
                if capture == CAPTURES or "Unable to capture screenshot" not in str(error):
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    async def boxes(self) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of each element that can be clicked, in reading order, in CSS pixels of the window.

        A page may give larger numbers: Pillow draws each pixel of a frame, also those beside the image, and nothing else runs then.
        """
        found: Any = await self._page.evaluate(script("page_marks.js"))
        ends = (self.kind.width, self.kind.height) * 2
        return [tuple(min(max(0, side), end) for side, end in zip(box, ends, strict=True)) for box in found]

    async def tree(self, root: str) -> str:
        """The accessibility tree of the element of a CSS selector, as YAML."""
        text: str = await self._page.locator(root).first.aria_snapshot()
        return text

    async def act(self, action: Action) -> None:
        """Do what ``action`` says with mouse or keyboard. ``wait``, ``answer`` and ``terminate`` do nothing here."""
        points = [self._pixels(point) for point in action.points]
        keyboard = self._page.keyboard
        if action.kind == "type":
            await keyboard.type(action.text)
        elif action.kind in CLICKS or action.kind in ("key", "mouse_move", "left_click_drag", "scroll", "hscroll"):
            for key in action.keys:
                await keyboard.down(key)
            if action.kind != "key":
                await self._use_mouse(action, points)
            for key in reversed(action.keys):
                await keyboard.up(key)

    async def _use_mouse(self, action: Action, points: list[tuple[float, float]]) -> None:
        mouse = self._page.mouse
        if action.kind == "left_click_drag":
            start = points[0] if len(points) == 2 else self._pointer
            await mouse.move(*start)
            await mouse.down()
            await mouse.move(*points[-1], steps=5)  # some pages follow only a pointer that moves
            await mouse.up()
            self._pointer = points[-1]
            return
        if points:
            self._pointer = points[-1]
        if action.kind in CLICKS:
            button, count = CLICKS[action.kind]
            await mouse.click(*self._pointer, button=button, click_count=count)
            return
        await mouse.move(*self._pointer)
        if action.kind == "mouse_move":
            return
        if action.kind == "scroll":
            await mouse.wheel(0, -action.pixels)
        else:
            await mouse.wheel(-action.pixels, 0)
        # The wheel's event does not wait for the scroll.
        await self._page.evaluate("async () => void (await window.vlmrlNextFrame?.())")

    def _pixels(self, point: Point) -> tuple[float, float]:
        """A point of the screen in CSS pixels, inside the page."""
        width, height = self.kind.width, self.kind.height
        return min(point[0] * width, width - 1), min(point[1] * height, height - 1)

    async def close(self) -> None:
        await self._context.close()

    def _on_request(self, event: Any) -> None:
        if event["loaderId"]:  # a worker's script has none, and no event says that it is loaded
            self._pending.setdefault(event["requestId"], time.monotonic())

    async def _block(self, route: Any) -> None:
        self.blocked += 1
        kind = "aborted" if route.request.is_navigation_request() else "blockedbyclient"  # the page stays
        # The tab is closed: Playwright would print a traceback for each such request.
        with contextlib.suppress(Exception):
            await route.abort(kind)

    async def _on_dialog(self, dialog: Any) -> None:
        self._dialogs_shown += 1
        accepted = self._dialogs_shown <= MAX_DIALOGS
        if accepted:
            self.dialogs.append(f"{dialog.type}: {dialog.message}"[:500])
        if self._dialogs_shown > MOST_DIALOGS:
            return
        with contextlib.suppress(Exception):  # the tab is closed
            await (dialog.accept() if accepted else dialog.dismiss())

    def take_dialogs(self) -> list[str]:
        """The dialogs since the last observation."""
        self._dialogs_shown = 0
        taken, self.dialogs = self.dialogs, []
        return taken

    async def _on_popup(self, page: Any) -> None:
        if page is not self._page:
            await page.close()
