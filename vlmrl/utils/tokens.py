"""Tokens of HTTP servers: when one is required, where it is read, how it is sent.

A token is in an environment variable, and in no config, log or command line.
"""

from __future__ import annotations

import ipaddress
import os


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


def is_loopback(host: str) -> bool:
    """Whether a server that listens at ``host`` can be reached from its own machine only. Of names, only ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
