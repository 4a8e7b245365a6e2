"""The browsers of a process: one Chromium for all its episodes, replaced when it ends, hangs or grows."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from vlmrl.env.browser.browser_tab import BrowserTab, TabKind
from vlmrl.env.browser.chromium_process import (
    START_SECONDS,
    ChromiumProcess,
    check_temporary_folder,
    find_chromium,
    read_error,
)
from vlmrl.utils.machine_memory import memory_bytes
from vlmrl.utils.require import require
from vlmrl.utils.threads import LoopThread

T = TypeVar("T")

TAB_BYTES = 100 * 2**20  # of memory for each session, by which their number is bounded
MAX_SESSIONS = 256
MAX_EPISODES = 200  # of one tab, whose process is then replaced
QUEUE_SECONDS = 600.0  # for a free session
OPENING = 4  # new tabs at once: each takes most of a second of a core, and all of them would miss their deadline
MEASURE_SECONDS = (1.0, 10.0)  # between two measurements of memory: the more, the longer one takes, as of many tabs
MEASURE_SHARE = 0.1  # of the time


class BrowserFailure(RuntimeError):
    """Chromium ended, hung or refused a call: an error of the env, never of the model."""


@dataclass(frozen=True)
class PoolLimits:
    """``sessions`` at once and ``memory_mib`` of one Chromium, both by default half of this machine's memory."""

    chromium: str
    sessions: int
    memory_mib: int
    timeout: float  # seconds, of each call

    @classmethod
    def of(
        cls,
        chromium: str | None = None,
        sessions: int | None = None,
        memory_mib: int | None = None,
        timeout: float = 30.0,
    ) -> PoolLimits:
        check_temporary_folder()
        half = memory_bytes() // 2
        limits = cls(
            find_chromium(chromium),
            sessions if sessions is not None else max(1, min(MAX_SESSIONS, half // TAB_BYTES)),
            memory_mib if memory_mib is not None else half // 2**20,
            timeout,
        )
        for name in ("sessions", "memory_mib", "timeout"):
            require(getattr(limits, name) > 0, f"env_options.{name}", "positive", getattr(limits, name))
        return limits


@dataclass
class Lease:
    """What an episode has of the pool: nothing until it is opened, then a tab and the browser that the tab belongs to.

    The episode makes it, so that a tab which is opened while the episode is cancelled is not lost.
    """

    tab: BrowserTab | None = None
    process: ChromiumProcess | None = None
    broken: bool = False


class BrowserPool:
    """Gives episodes tabs of one Chromium, at most ``limits.sessions`` at once. ``counts`` counts what was started, ended and lost.

    Everything runs in an event loop of its own, whose deadlines hold while others compute. Methods may be called from any loop.
    """

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self.loop = LoopThread("browsers")
        self.loop.loop.set_exception_handler(_ignore_closed_connection)
        self._free = asyncio.Semaphore(limits.sessions)
        self._starting = asyncio.Lock()
        self._opening = asyncio.Semaphore(OPENING)
        self._process: ChromiumProcess | None = None
        self._all: set[ChromiumProcess] = set()
        self._ending: set[ChromiumProcess] = set()
        self._idle: list[tuple[BrowserTab, ChromiumProcess]] = []
        self._chores: set[asyncio.Task[None]] = set()
        atexit.register(self.close)

    async def open(self, lease: Lease, kind: TabKind, reuse: bool) -> None:
        """Give the lease a tab; with ``reuse`` it may have shown other episodes. Raises BrowserFailure."""
        await self.loop.run(self._open(lease, kind, reuse))

    async def run(self, lease: Lease, call: Coroutine[Any, Any, T]) -> T:
        """A call of the lease's tab, with a deadline. Raises BrowserFailure, after which the lease is only to be closed."""
        return await self.loop.run(self._run(lease, call))

    async def give_back(self, lease: Lease, reuse: bool) -> None:
        """End an episode's use of its tab, if it has one. It never fails, and its deadline is its own."""
        await self.loop.run(self._give_back(lease, reuse))

    async def measure(self) -> int:
        """The bytes of memory that all its browsers use."""

        async def measured() -> int:
            return sum([await each.memory_bytes() for each in self._all if each.alive])

        return await self.loop.run(measured())

    def close(self) -> None:
        """End all browsers."""
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):
            self.loop.wait(self._end_all(), timeout=15)
        for process in self._all | self._ending:
            process.kill_now()
        self.loop.close()

    async def _open(self, lease: Lease, kind: TabKind, reuse: bool) -> None:
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise BrowserFailure(
                f"no browser session became free in {QUEUE_SECONDS:g} s: there are {self.limits.sessions} (env_options.sessions). Set "
                "rollout.max_concurrent to at most that."
            ) from None
        try:
            lease.tab, lease.process = await self._take(kind, reuse)
        except BaseException:
            self._free.release()
            raise

    async def _take(self, kind: TabKind, reuse: bool) -> tuple[BrowserTab, ChromiumProcess]:
        process = await self._running()
        idle = next((pair for pair in self._idle if reuse and pair[0].kind == kind and pair[1] is process), None)
        if idle is not None:
            self._idle.remove(idle)
            process.tabs += 1
            return idle
        process.tabs += 1
        try:
            return await self._new_tab(process, kind), process
        except BaseException:
            process.tabs -= 1
            self._do_later(self._check(process))
            raise

    async def _new_tab(self, process: ChromiumProcess, kind: TabKind) -> BrowserTab:
        """A tab. If it comes too late or nobody waits for it any more, it is closed: Chromium makes it all the same.

        So it counts among those that are being opened until it is made, or until its deadline.
        """
        await self._opening.acquire()
        making = asyncio.create_task(BrowserTab.new(process.handle, kind, self.limits.timeout))
        timed = asyncio.create_task(self._timed(making, "new tab"))
        timed.add_done_callback(read_error)
        timed.add_done_callback(lambda _: self._opening.release())
        try:
            return await asyncio.shield(timed)
        except BaseException:
            self._do_later(self._close_unused(making))
            raise

    async def _close_unused(self, making: asyncio.Task[BrowserTab]) -> None:
        tab = await making
        await self._timed(tab.close(), "close")

    async def _running(self) -> ChromiumProcess:
        async with self._starting:
            if self._process is not None and self._process.alive and not self._process.retired:
                return self._process
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._process = await ChromiumProcess.start(self.limits.chromium, self._ended)
            except Exception as error:
                raise BrowserFailure(f"{self.limits.chromium} does not start: {_reason(error)}") from error
            self._all.add(self._process)
            self.counts["started"] += 1
            self._do_later(self._watch_memory(self._process))
            return self._process

    def _ended(self, process: ChromiumProcess) -> None:
        """Chromium has ended, by us or by itself: its driver is ended too."""
        self._idle = [pair for pair in self._idle if pair[1] is not process]
        if process in self._all and not process.retired:
            self.counts["lost"] += 1
            self._do_later(self._end(process, kill=True))

    async def _run(self, lease: Lease, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._timed(call, getattr(call, "__name__", "call"))
        except BaseException:
            lease.broken = True
            raise

    async def _timed(self, call: Awaitable[T], name: str) -> T:
        """The result of ``call``. Raises BrowserFailure if it fails or takes longer than the limit.

        A call that is given up goes on until its tab is closed. If it were cancelled, Playwright would abort it, might get a second
        answer for it, and would fail the next call of any episode with that.
        """
        task = asyncio.ensure_future(call)
        task.add_done_callback(read_error)
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise BrowserFailure(f"{name}: Chromium took longer than {self.limits.timeout:g} s") from error
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise BrowserFailure(f"{name}: {_reason(error)}") from error

    async def _give_back(self, lease: Lease, reuse: bool) -> None:
        tab, process = lease.tab, lease.process
        lease.tab = lease.process = None
        if tab is None or process is None:
            return
        try:
            keep = reuse and not lease.broken and tab.episodes < MAX_EPISODES
            if keep and process.alive and not process.retired:
                self._idle.append((tab, process))
            elif process.alive:
                await self._timed(tab.close(), "close")
        except BrowserFailure:
            lease.broken = True
        finally:
            process.tabs -= 1
            self._free.release()
        if lease.broken:
            self._do_later(self._check(process))
        elif process.retired and not process.tabs:
            self._do_later(self._end(process, kill=False))

    async def _check(self, process: ChromiumProcess) -> None:
        """After a failure: a browser that does not answer is ended; its other sessions fail and are played again in a new one.

        Failures that come together are one check: each draws a page.
        """
        if process not in self._all or process.is_being_checked:
            return
        process.is_being_checked = True
        try:
            is_up = await process.answers()
        finally:
            process.is_being_checked = False
        if not is_up:
            self.counts["hung"] += process.alive
            await self._end(process, kill=True)

    async def _watch_memory(self, process: ChromiumProcess) -> None:
        """Hold a browser to its limit while its pages run, since one page can take gigabytes within its episode."""
        while process in self._all:
            began = time.monotonic()
            with contextlib.suppress(BrowserFailure):  # it may hang for a while
                await self._limit_memory(process)
            least, most = MEASURE_SECONDS
            pause = min(max(least, (time.monotonic() - began) / MEASURE_SHARE), most)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.ended.wait(), pause)

    async def _limit_memory(self, process: ChromiumProcess) -> None:
        """A browser above the limit gets no new sessions and ends after its last one; at twice the limit, it is ended at once."""
        if not process.alive:
            return
        used = await self._timed(process.memory_bytes(), "memory") / 2**20
        if used <= self.limits.memory_mib:
            return
        self.counts["too_large"] += not process.retired
        process.retired = True
        idle, self._idle = self._idle, []
        if used > 2 * self.limits.memory_mib or not process.tabs:
            await self._end(process, kill=used > 2 * self.limits.memory_mib)
        else:
            for tab, _ in idle:
                await self._timed(tab.close(), "close")

    async def _end(self, process: ChromiumProcess, kill: bool) -> None:
        if process in self._all:
            self._all.discard(process)
            process.ended.set()
            self._ending.add(process)
            self._idle = [pair for pair in self._idle if pair[1] is not process]
            await process.end(kill)
            self._ending.discard(process)

    async def _end_all(self) -> None:
        ends = [self._end(process, kill=False) for process in tuple(self._all)]
        await asyncio.gather(*ends, *self._chores)

    def _do_later(self, chore: Coroutine[Any, Any, None]) -> None:
        async def suppressed() -> None:
            with contextlib.suppress(Exception):
                await chore

        task = asyncio.create_task(suppressed())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


@cache
def shared_pool(limits: PoolLimits) -> BrowserPool:
    """The process's pool with these limits."""
    return BrowserPool(limits)


def _ignore_closed_connection(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Playwright leaves futures behind when its driver is killed, which asyncio would print as never retrieved."""
    if "Connection closed" not in str(context.get("exception")):
        loop.default_exception_handler(context)


def _reason(error: BaseException) -> str:
    """The first line of an error; Playwright's go on with logs."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}"[:500]
