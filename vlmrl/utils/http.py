"""HTTP requests to services: one client, which failures are retried, and how long the pauses between attempts are.

    client = HttpClient(timeout=10.0)
    retrying(patience=30.0)(client.post_json, url, body)     # the response's JSON; RetryableError after 30 s of failures

All requests of a process run in one event loop (:func:`http_loop`) with one pool of connections. Proxies are those of the environment.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import math
import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import aiohttp
import tenacity
from yarl import URL

from vlmrl.utils import open_files
from vlmrl.utils.json_files import MAX_VALUES, check_values, short_int
from vlmrl.utils.threads import LoopThread

FIRST_PAUSE = 0.25  # seconds; each further pause is twice as long
IDLE_SECONDS = 2.0
"""For which a connection is kept for the next request. Inference servers close theirs after 5 idle seconds, and a request that is
sent at that moment fails."""
RESPONSE_LIMIT = 256 * 2**20  # bytes of one response
SHORTEST_TOKEN = 16  # characters of a token that responses must not repeat: a shorter one may be a word
BUFFER = 2**12
"""Bytes of a body, and 16 times its chunks, after which aiohttp parses no more of it until they are read. Parsing 40,000 chunks of one
byte, which fit into one read of a socket, takes 0.4 s, in which no other connection is served."""
_LOCK = threading.Lock()
_LOOPS: list[LoopThread] = []
BAD_ADDRESS = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError)


class RetryableError(Exception):
    """A failure that another attempt may not meet: no connection, a timeout, status 429 or 5xx, an unusable response.

    ``after``: the seconds that the server asks to wait before the next attempt.
    """

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class UnreachableError(RetryableError):
    """The server refuses connections, or has no address: the request was not sent."""


class RefusedError(Exception):
    """A response that another attempt would meet again: a ``status`` other than 200, 429 and 5xx, or a body that cannot be used."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class HttpResponse(NamedTuple):
    """The status, the body and the headers of a response."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class HttpClient:
    """Requests that block the calling thread, for any number of threads.

    ``timeout``, in seconds, limits the time to connect and between two parts of a response, ``limit`` its bytes (None:
    RESPONSE_LIMIT). ``headers`` go with each request. Without ``proxies`` the environment's are not used.
    """

    def __init__(
        self,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        *,
        proxies: bool = True,
        limit: int | None = None,
    ) -> None:
        self.timeout = timeout
        self.limit = limit
        self.headers = dict(headers or {})
        self._proxies = proxies
        self._pending: set[Future[HttpResponse]] = set()
        self._aborted = False

    def send(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> tuple[int, bytes]:
        """One request with a JSON body, if there is one: the status and the body of the response. Redirects are not followed.

        The whole response may take ``seconds``, by default ``timeout``.

        Raises:
            RetryableError: no connection, no whole response in time, or one of more than ``limit`` bytes.
            RefusedError: no valid address.
            ValueError: the body holds what JSON lacks, such as NaN.
            ConnectionAbortedError: :meth:`abort` was called.
        """
        aborted = ConnectionAbortedError(f"{url}: the request was aborted")
        if self._aborted:
            raise aborted
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = self.headers if body is None else self.headers | {"Content-Type": "application/json"}
        times = aiohttp.ClientTimeout(total=seconds or self.timeout, sock_connect=self.timeout, sock_read=self.timeout)
        sending = send_request(method, URL(url), content, headers, times, proxies=self._proxies, limit=self.limit)
        future = asyncio.run_coroutine_threadsafe(sending, http_loop().loop)
        self._pending.add(future)
        if self._aborted:  # before the future was pending
            future.cancel()
        try:
            response = future.result()
            return response.status, response.body
        except CancelledError:
            raise aborted from None
        finally:
            future.cancel()  # after an interrupt
            self._pending.discard(future)

    def post_json(self, url: str, body: Mapping[str, Any]) -> Any:
        """One request with a JSON body, and the JSON of its response.

        Raises:
            RetryableError: no response, or status 429 or 5xx.
            RefusedError: any other status but 200.
            ValueError: the response is not JSON.
        """
        status, response = self.send("POST", url, body)
        if status == 429 or status >= 500:
            raise RetryableError(f"{status} {excerpt(response, 200)}")
        if status != 200:
            raise RefusedError(f"{status} {excerpt(response, 300)}", status)
        return parse_json(response)

    def abort(self) -> None:
        """End all requests in flight and all later ones. May be called in any thread."""
        self._aborted = True
        for future in list(self._pending):
            future.cancel()


async def send_request(
    method: str,
    url: URL,
    content: bytes | None,
    headers: Mapping[str, str],
    times: aiohttp.ClientTimeout,
    *,
    proxies: bool = True,
    limit: int | None = None,
) -> HttpResponse:
    """One request, to be sent in :func:`http_loop`. Redirects are not followed. Raises as :meth:`HttpClient.send`."""
    data = None if content is None else BytesIO(content)  # sent in parts: it may have the size of a bucket of weights
    most = RESPONSE_LIMIT if limit is None else limit
    options: dict[str, Any] = {"data": data, "headers": headers, "timeout": times, "allow_redirects": False}
    try:
        if proxies:
            options |= proxy_of(url)
        with unquoted_errors():
            async with _shared_session().request(method, url, **options) as response:
                received = await read_at_most(response, most)
    except BAD_ADDRESS as error:
        raise RefusedError(f"{url} is not an http address") from error
    except (aiohttp.ClientError, OSError) as error:
        if type(error) is TimeoutError:
            raise RetryableError(f"no whole response in {times.total:g} s") from error
        is_unsent = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)
        raise (UnreachableError if is_unsent else RetryableError)(f"{type(error).__name__}: {error}") from error
    if received is None:
        raise RetryableError(f"the response has more than {most} bytes")
    return HttpResponse(response.status, received, response.headers)


@contextmanager
def unquoted_errors() -> Iterator[None]:
    """Raise errors of aiohttp that quote a response, which may repeat the token of its request, without the quote."""
    try:
        yield
    except aiohttp.ClientHttpProxyError:
        raise
    except aiohttp.ServerDisconnectedError:
        raise aiohttp.ServerDisconnectedError from None
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError):
        raise aiohttp.ClientPayloadError("the response is cut or no HTTP") from None


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body of a response, without the token of its request; None, without the rest of it, if it has more than ``limit`` bytes.

    A server may repeat the token, and what it says is logged and recorded.
    """
    received = bytearray()
    try:
        async for part in response.content.iter_any():
            received += part
            if len(received) > limit:
                return None
            await asyncio.sleep(0)  # more of it may be parsed already, or wait to be: others come first
    except RuntimeError as error:  # the connection was lost at a malformed chunk while nobody waited for it
        raise aiohttp.ClientConnectionError(f"the connection was lost: {error}") from error
    token = response.request_info.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    body = bytes(received)
    return body if len(token) < SHORTEST_TOKEN else body.replace(token, b"[the key]")


def http_loop() -> LoopThread:
    """The process's event loop for requests that it makes."""
    with _LOCK:
        if not _LOOPS:
            _LOOPS.append(LoopThread("http"))
        return _LOOPS[0]


def plain_session(connector: aiohttp.TCPConnector | None = None) -> aiohttp.ClientSession:
    """A session for any number of connections, without cookies, that asks for bodies as they are: without compression. One that comes
    compressed stays so."""
    open_files.allow_many()
    return aiohttp.ClientSession(
        connector=connector or aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        read_bufsize=BUFFER,
    )


def new_session(connector: aiohttp.TCPConnector | None = None) -> aiohttp.ClientSession:
    """A :func:`plain_session` that is closed when the process ends. To be called in :func:`http_loop`."""
    session = plain_session(connector)
    _SESSIONS.append(session)
    return session


@cache
def _shared_session() -> aiohttp.ClientSession:
    return new_session()


_SESSIONS: list[aiohttp.ClientSession] = []


@atexit.register
def _close_sessions() -> None:
    for session in _SESSIONS:
        with suppress(TimeoutError):
            http_loop().wait(session.close(), 1.0)


def proxy_of(url: URL) -> dict[str, Any]:
    """The options of a request to an address: the proxy that the environment names for it, if any."""
    proxies = getproxies()
    proxy = None if not proxies or proxy_bypass(url.host or "") else proxies.get(url.scheme, proxies.get("all"))
    if proxy is None:
        return {}
    return {"proxy": URL(proxy).with_user(None), "proxy_auth": aiohttp.BasicAuth.from_url(URL(proxy))}


def parse_json(response: bytes, most_values: int = MAX_VALUES) -> Any:
    """The JSON of a response. Raises ValueError, also for one that is nested too deeply, or may have more than ``most_values``."""
    check_values(response, most_values, "the response")
    try:
        return json.loads(response, parse_int=short_int)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the response is not JSON: {excerpt(response, 100)!r}") from error


def excerpt(response: bytes, length: int) -> str:
    """The start of a response, for messages."""
    return response[:length].decode(errors="replace")


def retrying(
    *,
    attempts: float = math.inf,
    patience: float = math.inf,
    longest_pause: float = math.inf,
    only: type[RetryableError] = RetryableError,
) -> tenacity.Retrying:
    """Calls a function again after each RetryableError of the kind ``only``; raises the last one when no attempt is left.

    Pauses double from 0.25 s up to ``longest_pause`` and are shortened at random by up to half, so that many clients do not
    return at the same moment; a longer one that the server asks for is kept. No pause begins that could end later than ``patience``
    seconds after the first attempt.
    """
    return tenacity.Retrying(**_rules(attempts, patience, longest_pause, only))


def async_retrying(
    *, attempts: float = math.inf, patience: float = math.inf, longest_pause: float = math.inf
) -> tenacity.AsyncRetrying:
    """As :func:`retrying`, for an async function."""
    return tenacity.AsyncRetrying(**_rules(attempts, patience, longest_pause))


def _rules(
    attempts: float, patience: float, longest_pause: float, only: type[RetryableError] = RetryableError
) -> dict[str, Any]:
    growing = tenacity.wait_exponential(multiplier=FIRST_PAUSE, max=longest_pause)

    def wanted(state: tenacity.RetryCallState) -> float:
        error = None if state.outcome is None else state.outcome.exception()
        return error.after if isinstance(error, RetryableError) else 0.0

    def stop(state: tenacity.RetryCallState) -> bool:
        waited = state.seconds_since_start or 0.0
        return state.attempt_number >= attempts or waited + max(growing(state), wanted(state)) > patience

    return {
        "retry": tenacity.retry_if_exception_type(only),
        "wait": lambda state: max(growing(state) * random.uniform(0.5, 1.0), wanted(state)),
        "stop": stop,
        "reraise": True,
    }
