"""One Chromium with the process of Playwright that drives it: started together, measured, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.utils.marked_processes import MARK, kill_marked, kill_processes
from vlmrl.utils.require import import_extra

START_SECONDS, PING_SECONDS, STOP_SECONDS = 60.0, 10.0, 5.0
DRAWING_SECONDS = 30.0  # for an empty page
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VARIABLE = "VLMRL_CHROMIUM"
SOCKET = "/org.chromium.Chromium.XXXXXX/SingletonSocket"
MAX_TEMPORARY = 107 - len(SOCKET)  # bytes; the kernel's limit for a socket's path is 107
# Chromium starts them for a link that leads to no web page, and has no option against it.
LINK_PROGRAMS = ("xdg-open", "xdg-email", "xdg-settings")
ARGUMENTS = (
    "--disable-smooth-scrolling",  # a scroll is done when its event is
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",  # the one way around a proxy
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # its name in earlier versions
    # Nor does a page send a name to the system's name server: WebRTC asks it for a TURN server's, whatever the proxy.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1, EXCLUDE ::1",
    "--disable-dev-shm-usage",  # a container's /dev/shm is small
    "--font-render-hinting=none",
    # The same document gives the same pixels, whenever its images arrived and whatever was drawn before:
    "--disable-partial-raster",
    "--disable-checker-imaging",
    "--disable-threaded-animation",
    "--disable-threaded-scrolling",
)


def find_chromium(path: str | None) -> str:
    """The Chromium to run: ``path``, else the environment variable VLMRL_CHROMIUM, else the first of :data:`NAMES` on PATH."""
    named = path or os.environ.get(VARIABLE)
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        what = f"{named} is not a program" if named else f"none of {', '.join(NAMES)} is on PATH"
        raise ValueError(
            f"env_options.chromium: no Chromium was found: {what}. Install one (Debian: apt install chromium), or name its program by "
            f"env_options.chromium or the environment variable {VARIABLE}."
        )
    return found


def check_temporary_folder() -> None:
    """Chromium makes a socket in the temporary folder and ends at once where its path is too long."""
    folder = tempfile.gettempdir()
    if (length := len(os.fsencode(folder))) > MAX_TEMPORARY:
        raise ValueError(
            f"TMPDIR must be at most {MAX_TEMPORARY} bytes long for Chromium, but {folder} has {length}. Set the environment variable "
            f"TMPDIR to a shorter folder, for example TMPDIR=/tmp."
        )


class ChromiumProcess:
    """A running Chromium. ``alive`` turns false when it ends; ``on_end`` is then called once."""

    def __init__(self, playwright: Any, handle: Any, control: Any, driver: set[int], main: int, mark: str) -> None:
        self.handle = handle
        self.alive = True
        self.retired = False  # it gets no new tabs
        self.tabs = 0  # in use
        self.is_being_checked = False
        self.ended = asyncio.Event()  # the pool has no use for it any more
        self._playwright = playwright
        self._control = control
        self._driver = driver  # its process; Chromium's have the mark
        self._mark = mark
        self._folders = _folders(main)

    @classmethod
    async def start(cls, program: str, on_end: Callable[[ChromiumProcess], None]) -> ChromiumProcess:
        """Start Chromium, connected by a pipe: it ends when its driver does, which ends when this process does."""
        api = import_extra("playwright.async_api", "browser")
        before = set(_drivers())
        playwright = await api.async_playwright().start()
        driver, mark = set(_drivers()) - before, uuid.uuid4().hex
        try:
            found_first = os.pathsep.join([programs_that_do_nothing().name, os.environ.get("PATH", os.defpath)])
            # The mark finds the processes that outlive the main one.
            environment = os.environ | {"PATH": found_first, MARK: mark}
            handle = await playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS), env=environment)
            control = await handle.new_browser_cdp_session()
            infos = (await control.send("SystemInfo.getProcessInfo"))["processInfo"]
        except BaseException:
            await _stop(playwright, driver, mark)
            raise
        (main,) = (info["id"] for info in infos if info["type"] == "browser")
        self = cls(playwright, handle, control, driver, main, mark)

        def ended(*_: Any) -> None:
            self.alive = False
            on_end(self)

        handle.on("disconnected", ended)
        return self

    async def answers(self) -> bool:
        """Whether Chromium's main process answers and draws an empty page in time: one process draws all pages, and may hang alone."""
        is_up = await self._succeeds(self._control.send("Browser.getVersion"), PING_SECONDS)
        return is_up and await self._succeeds(self._draw(), DRAWING_SECONDS)

    async def _succeeds(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> bool:
        """Whether a call succeeds in time. It is not cancelled: that may fail one of an episode."""
        call = asyncio.ensure_future(coroutine)
        call.add_done_callback(read_error)
        await asyncio.wait([call], timeout=seconds)
        return call.done() and call.exception() is None and self.alive

    async def _draw(self) -> None:
        context = await self.handle.new_context()
        try:
            page = await context.new_page()
            await page.screenshot()
        finally:
            await context.close()

    async def memory_bytes(self) -> int:
        """The memory of its processes; what several share is counted once."""
        infos = (await self._control.send("SystemInfo.getProcessInfo"))["processInfo"]
        return await asyncio.to_thread(memory_of, [info["id"] for info in infos])

    async def end(self, kill: bool) -> None:
        """End all its processes: at once with ``kill``, else by their own shutdown, for which they get some seconds."""
        self.alive, self.retired = False, True
        if kill:
            await asyncio.to_thread(kill_marked, self._mark)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_SECONDS):
                await self.handle.close()
        await _stop(self._playwright, self._driver, self._mark)
        await asyncio.to_thread(self._remove_folders)

    def kill_now(self) -> None:
        """End its processes without waiting for them."""
        self.alive = False
        kill_marked(self._mark)
        kill_processes(self._driver & set(_drivers()))
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


@cache
def programs_that_do_nothing() -> tempfile.TemporaryDirectory[str]:
    """A folder for Chromium's PATH, in which the programs for links such as ``mailto:`` do nothing, in place of the machine's own."""
    folder = tempfile.TemporaryDirectory(prefix="vlmrl-programs-")
    for name in LINK_PROGRAMS:
        program = Path(folder.name) / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return folder


async def _stop(playwright: Any, driver: set[int], mark: str) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(STOP_SECONDS):
            await playwright.stop()
    kill_processes(driver & set(_drivers()))  # its number may have been given again
    await asyncio.to_thread(kill_marked, mark)


def read_error(call: asyncio.Future[Any]) -> None:
    """Read the error of a call that was given up: asyncio would print that it was never retrieved."""
    if not call.cancelled():
        call.exception()


def _drivers() -> list[int]:
    """The processes of Playwright that this process started; empty where there is no /proc."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                if b"run-driver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


def _folders(pid: int) -> list[Path]:
    """The temporary folders of a Chromium (profile, socket), which remain if it or its driver is killed."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if found := re.search(r"--user-data-dir=([^\0]*playwright_chromiumdev_profile-[^\0]+)", words):
            profile = Path(found[1])
            return [profile, (profile / "SingletonSocket").readlink().parent]
    return []


def memory_of(pids: Iterable[int]) -> int:
    """The proportional set sizes of processes in bytes, 0 for those that have ended or cannot be read."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += 1024 * int(found[1]) if found else 0
    return total
