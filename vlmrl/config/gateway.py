"""Settings of the HTTP endpoint that agents call, and of the agents that a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from yarl import URL

from vlmrl.config.fields import Settings, positive
from vlmrl.utils.require import require

URLS = "urls"
"""Of ``gateway.images``: http and https URLs. A folder of this name is ``./urls``."""


@dataclass(frozen=True)
class Gateway(Settings):
    """The HTTP endpoint for `agent`, and the limits of the agents."""

    section = "gateway"
    address: str = "127.0.0.1:0"
    """Address to bind the endpoint to, as `HOST:PORT`. Port 0: any free port.
    Agents on other machines need another host, such as `0.0.0.0:8000`."""
    public_url: str | None = None
    """URL under which agents reach the endpoint, such as `http://10.0.0.5:8000`. Unset: the address."""
    images: tuple[str, ...] = ()
    """Where images that agents name are loaded from, besides data URIs.
    `urls`: http and https URLs of every public address. `http://HOST`: those of a host, which may be of this machine or its network.
    `http://HOST:PORT`: those of only that port of the host. Both allow http and https.
    Others: folders on this machine, whose files are named by path or by file URL."""
    agent_timeout: float = 600.0
    """Timeout of one agent, from its start to its end, in seconds. `rollout.max_concurrent` limits how many run at once."""

    def __post_init__(self) -> None:
        positive("gateway", self, "agent_timeout")
        host, _, port = self.address.rpartition(":")
        known = bool(host) and port.isdecimal() and int(port) <= 65535
        require(known, "gateway.address", "HOST:PORT with a port from 0 (any free one) to 65535", self.address)
        if self.public_url is not None:
            parts = urlsplit(self.public_url)
            ok = parts.scheme in ("http", "https") and bool(parts.netloc)
            require(ok, "gateway.public_url", "a URL such as http://10.0.0.5:8000", self.public_url)
        for each in self.images:
            rule = "urls, http://HOST, http://HOST:PORT or a folder, without a user, a path or a query"
            require(not names_hosts(each) or each == URLS or bool(_host_of(each)), "gateway.images", rule, each)

    @property
    def image_hosts(self) -> tuple[str, ...]:
        """Hosts from which images that agents name by http or https URLs are loaded, with a port if only that one may be reached:
        ``images.lan``, ``[::1]:9000``. ``*``: every public address."""
        return tuple("*" if each == URLS else _host_of(each) for each in self.images if names_hosts(each))

    @property
    def image_folders(self) -> tuple[str, ...]:
        """Folders on this machine whose image files agents may name."""
        return tuple(each for each in self.images if not names_hosts(each))

    @property
    def host(self) -> str:
        """The host of the address; an IPv6 one without brackets."""
        return self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])


def names_hosts(entry: str) -> bool:
    """Whether an entry of ``images`` names hosts, and not a folder."""
    return entry == URLS or entry.lower().startswith(("http://", "https://"))


def _host_of(entry: str) -> str:
    """The host of ``http://HOST``, with the port if there is one; ``""`` for any other address."""
    try:
        url = URL(entry)
        port = url.explicit_port
    except ValueError:  # `http://[`, or a port that is none
        return ""
    has_more = entry.removesuffix("/").endswith(":") or url.path not in ("", "/") or url.query_string or url.fragment
    if has_more or url.host in (None, "", "*") or url.user is not None:
        return ""
    return str(url.host) if port is None else f"{url.host_subcomponent}:{port}"
