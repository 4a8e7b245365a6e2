"""All servers of a run: started by the run or external, watched, restarted and resynced.

A server serves only while it is healthy and has the current weights. Otherwise the pool drains it until both are true again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from vlmrl.engine.base import EngineError
from vlmrl.engine.server import TAIL, TOKEN_VARIABLE, UNREACHED, Server, ServerError, ServerInfo, suppress_unreachable
from vlmrl.engine.server_backend import Call, EncodedBody, ServerBackend
from vlmrl.utils.http import excerpt, parse_json, plain_session, read_at_most, unquoted_errors
from vlmrl.utils.json_files import MAX_VALUES
from vlmrl.utils.terminal import printable_log
from vlmrl.utils.tokens import bearer

CHECK_SECONDS = 30.0  # time limit of one health check
MOST_VALUES = 2**26  # of any response: 4 for each of 100 likely ids at 160,000 tokens
MOST_BYTES = 2**30  # of a response: the experts of a long context take hundreds of MiB
PIECE = 2**18  # bytes of a body that are written at once: what a slow connection does not take yet is copied
EXPECTED = (*UNREACHED, ServerError, EngineError)  # failures of a server; any other error is one of this program

log = printable_log(__name__)


@dataclass(frozen=True)
class Limits:
    """How long failures are borne. A server that computes a long prompt answers no health check for up to a minute."""

    health_every: float = 10.0
    """Seconds between two health checks of a server."""
    health_timeout: float = 120.0
    """Seconds of failed health checks after which a server counts as dead."""
    retries: int = 8
    """Of a failed request. With the back-off they outlast a restart of the server."""


class ServerPool:
    """All servers of one run. Its coroutines run in one event loop, that of the engine's thread.

    ``resync`` sends a server the current weights before it serves again. Set it before :meth:`start`.
    """

    def __init__(
        self,
        backend: ServerBackend,
        servers: Sequence[Server],
        colocated: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.backend = backend
        self.settings = backend.settings
        self.limits = limits or Limits()
        self.all = list(servers)
        self.resync: Callable[[Server], Awaitable[None]] = _nothing
        self.restarts = 0
        self.paused = False
        self.closed = False
        """Requests fail from now on."""
        self.colocated = colocated
        """The trainer uses the servers' GPUs while they are paused. No server may start then."""
        self.update_lock = asyncio.Lock()
        """Held during a weight update of all servers, and during the resync of one."""
        self._starting: set[Server] = set()
        self._changed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.ready]

    @property
    def read_files(self) -> bool:
        """Whether requests contain paths of image files instead of the images."""
        return self.backend.capabilities.image_files and all(server.reads_files for server in self.all)

    async def start(self) -> None:
        """Start the servers and wait until all are healthy.

        Raises EngineError if one is not within ``start_timeout``, ValueError if one is too old.
        """
        self._session = plain_session()
        for server in self.all:
            if server.process is not None:
                server.process.start()
        # Servers get this run's weights: a run that was killed may have left them paused.
        if self.resync is not _nothing:
            await asyncio.gather(*(self._end_pause(server) for server in self.all if server.process is None))
        await asyncio.gather(*map(self._until_up, self.all))

    async def serve_all(self) -> None:
        """All servers are healthy and have the current weights: let them serve, and watch them from now on."""
        for server in self.all:
            await self.serve(server)
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self.all]

    async def close(self) -> None:
        """Let all requests fail, those in flight too, and end the servers that the run started."""
        self.closed = True
        for server in self.all:
            await self.drain(server)
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        processes = [server.process for server in self.all if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))

    async def call(
        self,
        server: Server,
        path: str,
        body: Any = None,
        timeout: float | None = None,
        most_values: int = MAX_VALUES,
    ) -> Any:
        """GET ``path``, or POST ``body`` (JSON as Python objects, or an EncodedBody). Returns the JSON of the response, which may have
        ``most_values``: reading a million holds the interpreter for up to half a second.

        Raises ServerError if the server answers with an error or not in JSON, and one of UNREACHED if it does not answer.
        """
        content = await self._fetch(server, Call(path, body), timeout)
        try:
            return parse_json(content, min(most_values, MOST_VALUES)) if content.strip() else None
        except ValueError as error:
            raise ServerError(f"{server.url}{path}: HTTP 200, but {error}", 502) from None

    async def _fetch(self, server: Server, call: Call, timeout: float | None) -> bytes:
        """The body of the response to ``call``. A redirect is an error: the run talks only to the servers that it was given."""
        assert self._session is not None
        path, body = call
        headers = bearer(server.token)
        payload: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, EncodedBody):
            payload = {"data": _pieces(body)}
            headers |= {"Content-Type": "application/json", "Content-Length": str(body.size)}
            server.sent_bytes += body.size
        method = self._session.get if body is None else self._session.post
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout), "allow_redirects": False}
        with unquoted_errors():
            async with method(server.url + path, headers=headers, **options, **payload) as response:
                content = await read_at_most(response, MOST_BYTES)
        if content is None:
            raise ServerError(f"{server.url}{path}: the response has more than {MOST_BYTES} bytes", 502)
        if response.status != 200:
            raise ServerError(f"{server.url}{path}: HTTP {response.status}: {excerpt(content, TAIL)}", response.status)
        return content

    async def pick(self, preferred: Server | None, patience: float) -> Server:
        """``preferred`` if it serves, else the server with the fewest requests. Waits while none serves, or all are paused.

        A silent server gets one request at a time, unless no other serves: it may answer health checks, and no request.

        Raises EngineError after ``patience`` seconds, or when the pool is closed.
        """
        until = time.monotonic() + patience
        while True:
            if self.closed:
                raise EngineError(f"the engine was closed: no {self.backend.title} server serves any more")
            available = [] if self.paused else [s for s in self.ready if not s.backoff and not s.unresponsive]
            if preferred in available and preferred is not None and not preferred.silent:
                return preferred
            if available:
                return min(
                    available, key=lambda each: (each.silent and each.in_flight > 0, each.in_flight, each.silent)
                )
            left = until - time.monotonic()
            if left <= 0:
                servers = ", ".join(f"{server.url}: {server.last_error}".removesuffix(": ") for server in self.all)
                raise EngineError(
                    f"no {self.backend.title} server has served for {patience:g} s ({servers}){self.all[0].log_tail()}"
                )
            backoffs = [server.backoff for server in self.ready if server.backoff]
            await self._wait_for_change(left if self.paused else min([left, *backoffs]))

    async def serve(self, server: Server) -> None:
        """The server is healthy and has the current weights: let it serve."""
        server.answered()
        server.images.clear()  # it may have been restarted
        server.ready, server.last_error = True, ""
        server.drained = asyncio.Event()
        await self.notify()

    async def answered(self, server: Server) -> None:
        """A request succeeded: end the server's back-off, for the requests that wait for it too."""
        waiting = server.backoff > 0
        server.answered()
        if waiting:
            await self.notify()

    async def drain(self, server: Server) -> None:
        """Take the server out of service. Its requests in flight fail, so that other servers can take them."""
        server.ready = False
        server.drained.set()
        await self.notify()

    async def wait_for_starts(self) -> None:
        """Wait until each failed server has been restarted once. Without this, every pause would stop it again before it is up."""
        while self._starting:
            await self._wait_for_change(1.0)

    async def stop_awake(self) -> None:
        """Stop the processes of servers that did not fall asleep, because they failed. They restart after the pause."""
        awake = [server for server in self.all if server.process is not None and not (server.ready and server.asleep)]
        for server in awake:
            await self.drain(server)
        await asyncio.gather(*(asyncio.to_thread(server.process.stop, False) for server in awake if server.process))

    async def notify(self) -> None:
        """Wake every coroutine that waits for a server."""
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait()

    async def _until_up(self, server: Server) -> None:
        limit = self.settings.start_timeout
        if not await self._is_healthy(server, limit):
            reason = f"did not answer in server.start_timeout ({limit:g} s)"
            if not server.alive:
                reason = "ended while it started"
            raise EngineError(f"the {self.backend.title} server {server.url} {reason}{server.log_tail()}")
        server.info = await self._info(server)
        self.backend.check_version(server.url, server.info)

    async def _info(self, server: Server) -> ServerInfo:
        """What the server reports about itself. Raises EngineError if it refuses the token, reports something else, or nothing.

        Its time limit is that of a start: one program runs a dozen others to describe its machine.
        """
        limit = self.settings.start_timeout
        cause: Exception
        try:
            return self.backend.parse_info(await self.call(server, *self.backend.info, timeout=limit))
        except UNREACHED as error:
            why, cause = f"reported nothing about itself within {limit:g} s", error
        except ServerError as error:
            own = f"set the environment variable {TOKEN_VARIABLE} to its API key"
            why, cause = "reports nothing about itself (is it another program?)", error
            if error.status in (401, 403):
                why = f"refuses the token of this run: {own if server.process is None else 'it has another'}"
        except (AttributeError, LookupError, TypeError) as error:
            why, cause = "reports about itself in another form", error
        what = f"{type(cause).__name__}: {cause}{server.log_tail()}"
        raise EngineError(f"the {self.backend.title} server {server.url} {why}: {what}") from cause

    async def _is_healthy(self, server: Server, patience: float, ends_pause: bool = False) -> bool:
        """Whether a health check succeeds within ``patience`` seconds. Also sets ``server.unresponsive``.

        ``ends_pause``: a server that does not serve may have failed in a pause, in which it answers no check, and is resumed.
        """
        until = time.monotonic() + patience
        while server.alive:
            left = until - time.monotonic()
            try:
                await self._fetch(server, self.backend.health, timeout=max(0.1, min(CHECK_SECONDS, left)))
                if server.unresponsive:
                    server.unresponsive = False
                    await self.notify()
                return True
            except (*UNREACHED, ServerError):
                if left <= 0:
                    break
                server.unresponsive = True
            if ends_pause and not (server.ready or self.paused):
                await self._end_pause(server)
            await asyncio.sleep(min(0.5, left))
        return False

    async def _watch(self, server: Server) -> None:
        """Check one server's health for as long as the run lasts, and revive it when it fails."""
        broken = False  # its revival failed: it may be healthy, but cannot serve
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.health_every):
                    await server.check_health.wait()
            server.check_health.clear()
            if self.paused and (self.colocated or server.alive):
                continue  # a paused server answers no health check, and the trainer may still use its memory
            try:
                await self._check(server, broken)
                broken = False
            except Exception as error:  # whatever it is, the server gets its next check
                broken, before = True, server.last_error
                server.last_error = f"{type(error).__name__}: {error}"
                if not isinstance(error, EXPECTED) and server.last_error != before:
                    log.warning("the server %s cannot serve, and is tried again", server.url, exc_info=error)
                # a failed transfer asks for the next check at once: without a pause it would be repeated dozens of times a second
                await asyncio.sleep(min(1.0, self.limits.health_every))

    async def _check(self, server: Server, broken: bool) -> None:
        """Check the server's health, and revive it if it cannot serve. Raises if that fails."""
        checkable = not broken and not server.asleep  # a server that is asleep now has failed to wake: restart it
        healthy = checkable and await self._is_healthy(server, self.limits.health_timeout, ends_pause=True)
        if server.ready and (healthy or (self.paused and server.alive)):
            return
        await self.drain(server)
        if not broken:
            self._starting.add(server)
        try:
            await self._revive(server, restart=not healthy)
        finally:
            self._starting.discard(server)

    async def _revive(self, server: Server, restart: bool) -> None:
        """Restart the server if the run started it, wait until it is healthy, send it the current weights, and let it serve.

        A server that failed in a pause, and is not restarted, is still paused.
        """
        if (restart or server.asleep) and server.process is not None:
            await asyncio.to_thread(server.process.stop, False)  # without SIGTERM: it may hang
            self._check_not_paused(server)
            server.process.start()
            server.asleep = server.without_weights = False
            self.restarts += 1
        else:
            await self._end_pause(server)
        await self._until_up(server)
        async with self.update_lock:
            await self.resync(server)
        self._check_not_paused(server)
        await self.serve(server)

    async def _end_pause(self, server: Server) -> None:
        """End a pause in which the server failed, or an earlier run was killed. A paused server may answer no health check."""
        await suppress_unreachable(self.call(server, *self.backend.resume, timeout=CHECK_SECONDS))

    def _check_not_paused(self, server: Server) -> None:
        if self.paused and self.colocated:
            raise EngineError(
                f"the {self.backend.title} server {server.url} must wait: the trainer uses its GPUs until the pause ends"
            )


async def _pieces(body: EncodedBody) -> AsyncIterator[memoryview]:
    """The body as views of its parts, none larger than PIECE."""
    for part in body.parts:
        view = memoryview(part)
        for start in range(0, len(part), PIECE):
            yield view[start : start + PIECE]


async def _nothing(server: Server) -> None:
    pass
