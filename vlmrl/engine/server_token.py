"""Bearer tokens: a server that other machines can reach answers only the run that knows its token.

A token is in no config, log or command line. The run makes one for each server that it starts on such an address; the token of
running servers is in the environment variable :data:`VARIABLE`.
"""

from __future__ import annotations

import ipaddress
import os
import secrets

VARIABLE = "VLMRL_SERVER_TOKEN"


def new_token() -> str:
    """256 random bits, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def token_from_environment() -> str | None:
    """The token of running servers. None if the variable is not set or empty.

    Raises ValueError, without the token, for one that no HTTP header can contain.
    """
    token = os.environ.get(VARIABLE, "").strip()
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"the environment variable {VARIABLE} must have printable ASCII characters and no spaces.")
    return token or None


def bearer(token: str | None) -> dict[str, str]:
    """The HTTP headers of a request to a server with this token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_loopback(host: str) -> bool:
    """Whether a server that listens at ``host``, a name or an address, can be reached from its own machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
