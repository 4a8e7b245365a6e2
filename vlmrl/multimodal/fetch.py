"""Images at http addresses. One event loop fetches all of a process, so that a slow address holds no thread.

An address is tried again after a transport error, status 429 or 5xx (`utils/http.py`). All attempts together have a deadline. A body
has a limit, which is checked while it arrives.
"""

from __future__ import annotations

import asyncio
from functools import cache

import httpx

from vlmrl.utils.http import RefusedError, RetryableError, async_retrying
from vlmrl.utils.threads import LoopThread
from vlmrl.utils.work_pool import shared_loop

SECONDS = 60.0
"""Default deadline of one address: all attempts and pauses together."""
MAX_BYTES = 64 * 2**20
"""The largest body that is read."""
ATTEMPTS = 6
CHUNK_SECONDS = 20.0  # to connect, and between two chunks
MAX_REDIRECTS = 10
PERMANENT = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)  # transport errors that are the address's own fault


def is_url(source: object) -> bool:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def image_loop() -> LoopThread:
    """The event loop that fetches images and awaits the threads that decode them."""
    return shared_loop("images")


def fetch_blocking(url: str, seconds: float = SECONDS) -> bytes:
    """As :func:`fetch`; the calling thread waits."""
    return image_loop().wait(fetch(url, seconds))


async def fetch(url: str, seconds: float = SECONDS, client: httpx.AsyncClient | None = None) -> bytes:
    """The body at ``url``. Without a ``client``, to be called in the process's loop for images only.

    Raises:
        RetryableError: no attempt succeeded within ``seconds``; a later one may.
        RefusedError: another attempt would fail as well: another status, a body over the limit, no valid address.
    """
    failures: list[str] = []

    async def attempt() -> bytes:
        try:
            return await _get(client or _own_client(), url)
        except RetryableError as error:
            failures.append(str(error))
            raise

    try:
        async with asyncio.timeout(seconds):
            return await async_retrying(attempts=ATTEMPTS, patience=seconds)(attempt)
    except TimeoutError:
        last = f"; the last of {len(failures)} failures was {failures[-1]}" if failures else ""
        raise RetryableError(f"no whole reply within {seconds:g} s{last}") from None
    except RetryableError as error:
        raise RetryableError(f"{error} ({len(failures)} attempts)") from error


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    try:
        async with client.stream("GET", url) as response:
            _check(response)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise RefusedError(f"its body has more than {MAX_BYTES} bytes")
            return bytes(body)
    except PERMANENT as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
    except httpx.TransportError as error:
        raise RetryableError(f"{type(error).__name__}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:  # too many redirects, or no valid address
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _check(response: httpx.Response) -> None:
    status = f"{response.status_code} {response.reason_phrase}"
    if response.status_code == 429 or response.status_code >= 500:
        raise RetryableError(status)
    if response.status_code != 200:
        raise RefusedError(status)
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise RefusedError(f"its body has the encoding {encoding}, which was not requested")
    if int(response.headers.get("content-length", "0")) > MAX_BYTES:
        raise RefusedError(f"its body has {response.headers['content-length']} bytes, more than {MAX_BYTES}")


@cache
def _own_client() -> httpx.AsyncClient:
    return new_client()


def new_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client for any number of connections, which requests bodies without compression: their size is then the one on the wire."""
    return httpx.AsyncClient(
        transport=transport,
        timeout=CHUNK_SECONDS,
        headers={"Accept-Encoding": "identity"},
        limits=httpx.Limits(max_connections=None),
        follow_redirects=True,
        max_redirects=MAX_REDIRECTS,
    )
