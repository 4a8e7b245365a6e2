"""Tokens of HTTP servers: who must have one, where it is read, how it is sent.

A token is in an environment variable, and in no config, log or command line.
"""

from __future__ import annotations

import ipaddress
import os
import socket


def bearer_token(variable: str) -> str | None:
    """The token in an environment variable; ``None`` if the variable is unset or empty.

    Raises ValueError, which does not show the token, if it cannot be sent in a header.
    """
    token = os.environ.get(variable, "").strip()
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"the environment variable {variable} must hold a token of printable ASCII characters without spaces, but it does not."
        )
    return token or None


def bearer_headers(variable: str) -> dict[str, str]:
    """The header that sends the token of an environment variable; empty without one."""
    return bearer(bearer_token(variable))


def bearer(token: str | None) -> dict[str, str]:
    """The header that sends ``token``; empty for None."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches ``host``: every address that the name has is a loopback address."""
    try:
        found = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host must be an address of this machine, but {host!r} has none: {error}.") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
