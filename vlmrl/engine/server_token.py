"""Bearer tokens: a server that other machines can reach answers only the run that knows its token.

A token is in no config, log or command line. The run makes one for each server that it starts on such an address; the token of
running servers is in the environment variable :data:`VARIABLE`.
"""

from __future__ import annotations

import ipaddress
import secrets

from vlmrl.utils.tokens import bearer_token

VARIABLE = "VLMRL_SERVER_TOKEN"


def new_token() -> str:
    """256 random bits, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def token_from_environment() -> str | None:
    """The token of running servers, as :func:`~vlmrl.utils.tokens.bearer_token`."""
    return bearer_token(VARIABLE)


def is_loopback(host: str) -> bool:
    """Whether a server that listens at ``host``, a name or an address, can be reached from its own machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
