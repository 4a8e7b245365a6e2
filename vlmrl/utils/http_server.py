"""Common parts of vlmrl's HTTP servers: address, access, limits on a request's body, and serving an app.

    app = guarded(create_my_app(), token=None, max_body=2**20)
    run_server(app, Binding("127.0.0.1", 8100, None, 2**20, "MY_TOKEN"), "my env")       # until Ctrl-C
    server = ServerThread(app, open_port("127.0.0.1", 0), "mine")                          # until server.close()

All are applications of aiohttp. A server without a token listens on the loopback address only, and answers no request for another
host's name: a web page elsewhere whose name was pointed at 127.0.0.1 (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import secrets
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from vlmrl.utils import open_files
from vlmrl.utils.http import BUFFER
from vlmrl.utils.machine_memory import memory_bytes
from vlmrl.utils.require import require
from vlmrl.utils.terminal import printable_log
from vlmrl.utils.threads import LoopThread
from vlmrl.utils.tokens import bearer_token, is_loopback

BODY = web.RequestKey("body", bytes)  # of a request that a guard has let in
# Adds to the bytes that a guard holds for a request.
_COUNT: web.RequestKey[Callable[[int], None]] = web.RequestKey("count", None)
BODY_SECONDS = 120.0  # in which the whole body of a request must arrive
SEND_SECONDS = 120.0  # in which a client must read its response, but for an end that fits into the connection's buffers
# An idle connection stays open for longer than clients keep it, or a request could meet its end on the way. The headers of a request
# must arrive in this time, too.
KEEP_ALIVE_SECONDS = 75.0
GRACE_SECONDS = 5.0  # at the end, for responses that are being made
LINGER_SECONDS = 2.0  # for a body that is refused: a client that still sends it would not read why

FIRST_PORT = 20_000  # of those that free_ports tries: Ray's workers take ports from 10002 on
PORT_TRIES = 1000
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

log = printable_log(__name__)
_HTTP_ERRORS = logging.getLogger(f"{__name__}.protocol")  # of aiohttp: requests that are no HTTP, with tracebacks
_HTTP_ERRORS.setLevel(logging.CRITICAL)
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "logger": _HTTP_ERRORS,
    "handler_cancellation": True,  # a handler ends when its client has left
    "shutdown_timeout": GRACE_SECONDS,
    "lingering_time": 0.0,  # see drop_rest
    "read_bufsize": BUFFER,
    "auto_decompress": False,  # a body's limit is that of its bytes as sent
}


@dataclass(frozen=True)
class Binding:
    """Where a server listens and whom it answers: ``Binding("127.0.0.1", 8100, None, 2**26, "MY_TOKEN")``.

    Raises:
        ValueError: ``host`` is reachable from other machines and there is no ``token``, or a value is out of range.
    """

    host: str
    port: int
    token: str | None = field(repr=False)  # None: everybody who reaches the port is answered
    max_body: int  # bytes of a request's body
    token_variable: str  # the environment variable that holds the token

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "--port", "from 0 to 65535", self.port)
        require(self.max_body > 0, "--max-body-mib", "greater than 0", self.max_body / 2**20)
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host!r} can be reached from other machines, so a token is required: put one into the environment "
                f"variable {self.token_variable} (--token-variable), here and where the run starts, or listen on 127.0.0.1."
            )

    @classmethod
    def from_options(cls, host: str, port: int, token_variable: str, max_body_mib: float) -> Binding:
        """The binding that a command's options describe. The token is the value of the environment variable ``token_variable``."""
        return cls(host, port, bearer_token(token_variable), int(max_body_mib * 2**20), token_variable)

    def url(self, path: str = "") -> str:
        """The address to print; it says whether a token is required."""
        return url_of(self.host, self.port) + path + (" (requires a token)" if self.token else "")

    def open_port(self) -> socket.socket:
        """Listen. Raises ValueError if the port is in use or cannot be opened."""
        try:
            return open_port(self.host, self.port)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror or error})"
            raise ValueError(f"--port {self.port} of --host {self.host} {reason}: choose another one.") from error


class BodyError(Exception):
    """A request's body that is too large (``status`` 413), too slow (408), malformed (400), or for which there is no room (503)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(
    request: web.BaseRequest, limit: int, setting: str, seconds: float, arrived: Callable[[int], None]
) -> bytes:
    """The body of a request, of at most ``limit`` bytes (which ``setting`` sets), if all of it arrives in ``seconds``.

    ``arrived`` is called with the number of bytes of each part, and may raise. Raises BodyError.
    """
    too_large = BodyError(413, f"the body has more than {limit} bytes ({setting}).")
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                arrived(len(part))
                body += part
                if len(body) > limit:
                    raise too_large
                await asyncio.sleep(0)  # more of it may be parsed already, or wait to be: others come first
    except TimeoutError:
        raise BodyError(408, f"the body did not arrive in {seconds:g} s.") from None
    except web.RequestPayloadError as error:
        raise BodyError(400, f"the body is malformed: {error}") from None
    return bytes(body)


async def drop_rest(request: web.BaseRequest) -> None:
    """Read what is left of the body of a request that is answered: a client that still sends it would not read the response."""
    with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError, RuntimeError):  # or it is closed
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in request.content.iter_any():
                await asyncio.sleep(0)  # as in read_body


def guarded(
    app: web.Application,
    token: str | None,
    max_body: int,
    *,
    seconds: float = BODY_SECONDS,
    public: Collection[str] = (),
) -> web.Application:
    """``app`` with a guard: it answers 401, 403, 408, 413 or 503 itself, and hands each other request on with its body.

    With a ``token``, a request needs the header ``Authorization: Bearer TOKEN`` (but for the ``public`` paths), and is refused before
    its body is read; without one, its ``Host`` must be a name of the loopback address, and no web page of another host may send it.
    A body may have ``max_body`` bytes and take ``seconds`` to arrive; handlers find it as ``request[BODY]``. All bodies and responses
    together, but for the responses of ``public`` paths, have a quarter of the memory. The connection of a client that does not read
    its response in SEND_SECONDS is closed.
    """

    held, room = 0, max(max_body, memory_bytes() // 4)  # bytes of the bodies and responses of all requests

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await send_rest(request, await answer(request, handler))
        await drop_rest(request)
        return response

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal held
        if (refusal := _refusal(request, token, public)) is not None:
            return refusal
        size = 0

        def arrived(more: int) -> None:
            nonlocal size, held
            size, held = size + more, held + more
            if held > room:
                raise BodyError(503, f"the requests and their responses have more than {room} bytes: try again.")

        try:
            request[BODY] = await read_body(request, max_body, "--max-body-mib", seconds, arrived)
            request[_COUNT] = arrived
            response = await handler(request)
            request[BODY] = b""  # from here on the response counts in its place
            arrived(-size if request.path in public else _size(response) - size)
            return await send_rest(request, response)
        except BodyError as error:
            return _refused(error.status, str(error))
        except web.HTTPException as error:  # it is a response, too
            await send_rest(request, error)
            raise
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return _refused(500, f"{type(error).__name__}: {error}")
        finally:
            held -= size

    app.middlewares.append(guard)
    return app


def names_this_machine(request: web.BaseRequest) -> bool:
    """Whether a request has one ``Host`` header, and that names the loopback address: ``127.0.0.1:8321``."""
    hosts = request.headers.getall("Host", [])
    return len(hosts) == 1 and _is_local(f"//{hosts[0]}")


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _is_of_another_page(request: web.BaseRequest, public: Collection[str]) -> bool:
    """Whether a browser sends the request for a page of another host. It may do so, though the page cannot read the response.

    A link to a ``public`` path, the page of `vlmrl view`, is no harm.
    """
    origin = request.headers.get("Origin")
    if origin is not None and not _is_local(origin):
        return True
    site, mode = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode"))
    return site == "cross-site" and not (mode == "navigate" and request.path in public)


def _refusal(request: web.BaseRequest, token: str | None, public: Collection[str]) -> web.Response | None:
    """The response to a request that a guard does not let in, before its body is read."""
    if token is None and not names_this_machine(request):
        return _refused(403, "this server answers to 127.0.0.1 and localhost only, as long as it requires no token.")
    if token is None and _is_of_another_page(request, public):
        return _refused(403, "this server answers to no page of another site, as long as it requires no token.")
    if token is not None and request.path not in public and not _has_token(request, token):
        return _refused(401, "the token is missing or wrong: send it as `Authorization: Bearer TOKEN`.")
    return None


def _has_token(request: web.BaseRequest, token: str) -> bool:
    headers = request.headers.getall("Authorization", [])
    scheme, _, given = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.encode(errors="replace"), token.encode())


async def send_rest(request: web.Request, response: web.StreamResponse, last: bytes = b"") -> web.StreamResponse:
    """Send what is left of a response, with ``last`` at its end if it is a stream.

    Raises ConnectionAbortedError if the client does not read it in SEND_SECONDS, or if there is no room for ``last``.
    """
    try:
        if last:
            request[_COUNT](len(last))
        async with asyncio.timeout(SEND_SECONDS):
            await response.prepare(request)
            await response.write_eof(last)
    except (TimeoutError, BodyError):
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the client does not read the response, or there is no room for it") from None
    return response


def _size(response: web.StreamResponse) -> int:
    """The bytes of a response's body."""
    return len(response.body) if isinstance(response, web.Response) and isinstance(response.body, bytes) else 0


def _refused(status: int, message: str) -> web.Response:
    response = web.Response(status=status, text=message)
    response.force_close()
    return response


def run_server(app: web.Application, binding: Binding, what: str, path: str = "") -> None:
    """Open the port, print ``what`` and the URL of ``path``, and serve an app, guarded, until interrupted.

    Raises ValueError if the port is in use or cannot be opened.
    """
    guarded(app, binding.token, binding.max_body)
    with binding.open_port() as listener:
        opened = replace(binding, port=listener.getsockname()[1])
        print(f"{what} at {opened.url(path)}", flush=True)
        serve_on(listener, app)


def open_port(host: str, port: int) -> socket.socket:
    """Listen at an address. Port 0 chooses a free one. Raises OSError if the port is in use or cannot be opened."""
    open_files.allow_many()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of this machine that are free right now, for programs that open them later.

    The kernel gives none of them to another program in the meantime: they are below the range from which it takes the ports of
    connections, unless that begins too low.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        ports = _ports_to_try()
        for each in sockets:
            for port in ports:
                with contextlib.suppress(OSError):
                    each.bind((host, port))
                    break
            else:
                each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def _ports_to_try() -> Iterator[int]:
    """Random ports that the kernel gives to nobody by itself. Empty if there is no such range, as on other systems than Linux."""
    try:
        below = range(FIRST_PORT, int(_KERNELS_PORTS.read_text().split()[0]))
    except (OSError, ValueError):
        below = range(0)
    own = random.SystemRandom()  # not the ports of another run with the same seed
    return iter(own.sample(below, min(PORT_TRIES, len(below))))


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_on(listener: socket.socket, app: web.Application) -> None:
    """Serve an app on an open port until Ctrl-C or SIGTERM, which end it after the requests that it answers."""
    web.run_app(app, sock=listener, print=None, keepalive_timeout=KEEP_ALIVE_SECONDS, **_OPTIONS)


class ServerThread:
    """Serves an app on an open port, in an event loop and a thread of its own, until :meth:`close`."""

    def __init__(
        self, app: web.Application, listener: socket.socket, name: str, keep_alive: float = KEEP_ALIVE_SECONDS
    ) -> None:
        self.thread = LoopThread(name)
        self._runner = web.AppRunner(app, keepalive_timeout=keep_alive, **_OPTIONS)
        self.thread.wait(self._start(listener))

    async def _start(self, listener: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=2048).start()

    def close(self) -> None:
        """End the server after the responses that are being made, and its thread."""
        self.thread.wait(self._runner.cleanup(), 4 * GRACE_SECONDS)  # aiohttp waits twice, then cancels
        self.thread.close()
