"""Images at http addresses. The event loop of all requests fetches them, so that a slow address holds no thread.

An address is tried again after a transport error, status 429 or 5xx (`utils/http.py`). All attempts together have a deadline. A body
has a limit, which is checked while it arrives.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Collection
from functools import cache
from typing import Any

import aiohttp
from yarl import URL

from vlmrl.utils.http import (
    BAD_ADDRESS,
    RefusedError,
    RetryableError,
    async_retrying,
    new_session,
    proxy_of,
    read_at_most,
)

SECONDS = 60.0
"""Default deadline of one address: all attempts and pauses together."""
MAX_BYTES = 64 * 2**20
"""The largest body that is read."""
ATTEMPTS = 6
TIMES = aiohttp.ClientTimeout(total=None, sock_connect=20.0, sock_read=20.0)  # to connect, and between two chunks
MAX_REDIRECTS = 10
MAX_URL = 2**14
"""Characters of an address. yarl keeps the latest ones."""
MAX_HOST = 300
"""Characters of a host with its user and port. Encoding one with 10,000 other letters than ASCII's takes half a minute."""
REDIRECTS = (301, 302, 303, 307, 308)
ANY_PUBLIC = "*"
NOT_PUBLIC = "is not a public address of the internet"
# IPv6 addresses that end with an IPv4 one.
TRANSLATED = [ipaddress.ip_network(net) for net in ("::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")]
# Networks that Python 3.11 takes for public: Azure's and Oracle's metadata, translators, and a QEMU guest's way to its host (fec0::2)
LOCAL = [
    ipaddress.ip_network(net)
    for net in ("168.63.129.16/32", "192.0.0.0/24", "::/96", "64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10")
]


def is_url(source: object) -> bool:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


async def fetch(url: str, seconds: float = SECONDS, hosts: Collection[str] | None = None) -> bytes:
    """The body at ``url``. To be called in :func:`vlmrl.utils.http.http_loop` only.

    ``hosts`` limits which hosts may be reached, also by redirects: names or addresses, with a port (``[::1]:80``) or at any port;
    ``*``: all at public addresses. None: all.

    Raises:
        RetryableError: no attempt succeeded within ``seconds``; a later one may.
        RefusedError: another attempt would fail as well: another status, a body over the limit, no valid address.
    """
    failures: list[str] = []

    async def attempt() -> bytes:
        try:
            return await _get(url, hosts)
        except RetryableError as error:
            failures.append(str(error))
            raise

    try:
        async with asyncio.timeout(seconds):
            return await async_retrying(attempts=ATTEMPTS, patience=seconds)(attempt)
    except TimeoutError:
        last = f"; the last of {len(failures)} failures was {failures[-1]}" if failures else ""
        raise RetryableError(f"no whole response within {seconds:g} s{last}") from None
    except RetryableError as error:
        raise RetryableError(f"{error} ({len(failures)} attempts)") from error


async def _get(address: str, hosts: Collection[str] | None) -> bytes:
    url: str | URL = address
    for _ in range(MAX_REDIRECTS + 1):
        try:
            url = _parsed(url) if isinstance(url, str) else url
            session, options = _route(url, hosts)
            async with session.get(url, allow_redirects=False, timeout=TIMES, **options) as response:
                if response.status not in REDIRECTS or "Location" not in response.headers:
                    return await _content(response)
                url = url.join(_parsed(response.headers["Location"]))
        except BAD_ADDRESS as error:
            raise RefusedError(f"{url!s:.{MAX_HOST}} is not an http address") from error
        except (aiohttp.ClientError, OSError) as error:
            if NOT_PUBLIC in str(error):
                raise RefusedError(f"{URL(url).host} {NOT_PUBLIC}") from error
            raise RetryableError(f"{type(error).__name__}: {error}") from error
    raise RefusedError(f"it has more than {MAX_REDIRECTS} redirects")


def _parsed(address: str) -> URL:
    """Raises ValueError for no valid address, and for one that takes long to parse."""
    if len(address) > MAX_URL:
        raise ValueError
    read = re.sub("^[\0- ]+|[\t\r\n]", "", address)  # as URL reads it
    place = re.match("(?:[^/?#:]*:)?//([^/?#]*)", read)
    if place and len(place[1]) > MAX_HOST:
        raise ValueError
    return URL(address)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    status = f"{response.status} {response.reason}"
    if response.status == 429 or response.status >= 500:
        raise RetryableError(status)
    if response.status != 200:
        raise RefusedError(status)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise RefusedError(f"its body has the encoding {encoding}, which was not requested")
    body = None if (response.content_length or 0) > MAX_BYTES else await read_at_most(response, MAX_BYTES)
    if body is None:
        raise RefusedError(f"its body has more than {MAX_BYTES} bytes")
    return body


def _route(url: URL, hosts: Collection[str] | None) -> tuple[aiohttp.ClientSession, dict[str, Any]]:
    """The session that may reach an address, and the options of its requests. Raises RefusedError if none may."""
    # A host may be called `*`, too: the system's resolver reads it as no name at all, which is this machine.
    if hosts is None or (url.host in hosts and url.host != ANY_PUBLIC) or _place(url) in hosts:
        return _session(), proxy_of(url)
    if ANY_PUBLIC not in hosts:
        raise RefusedError(f"the host {_place(url)} is none of those from which images may be loaded")
    return _public_session(), {}  # without a proxy, which would resolve the name itself


def _place(url: URL) -> str:
    """The host and the port: ``images.lan:443``, ``[::1]:9000``."""
    return f"{url.host_subcomponent}:{url.port}"


@cache
def _session() -> aiohttp.ClientSession:
    return new_session()


@cache
def _public_session() -> aiohttp.ClientSession:
    return new_session(aiohttp.TCPConnector(limit=0, socket_factory=_public_socket))


def _public_socket(address: tuple[Any, ...]) -> socket.socket:
    """The socket for an address that is about to be connected to, whatever name or redirect led there."""
    family, kind, protocol, _, place = address
    if not is_public(place[0]):
        raise PermissionError(errno.EACCES, NOT_PUBLIC)
    return socket.socket(family, kind, protocol)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet, and none of this machine, of its network, or of a cloud's metadata."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if any(ip in network for network in TRANSLATED):
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.sixtofour is not None:
            return is_public(str(ip.sixtofour))
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in LOCAL)
