"""The HTTP server of a run's agents, in a thread and an event loop of its own."""

from __future__ import annotations

import secrets
import socket
from typing import Any

from vlmrl.config.gateway import Gateway
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.gateway_app import GatewayApp
from vlmrl.gateway.request_images import RequestImages
from vlmrl.utils.http_server import KEEP_ALIVE_SECONDS, ServerThread, open_port, url_of

KEY_BYTES = 16  # random; a key is not guessed, so that an address other than the loopback one needs no further token


class GatewayServer:
    """Answers agents at one port. It starts with the first :meth:`open`; episodes run on the event loop that called that.

    ::

        server = GatewayServer(config.gateway)
        client = await server.open(episode)          # a URL and a key of this episode
        server.close_episode(client)                 # ends its requests; later ones are answered with 410
        server.close()

    ``keep_alive`` is the time in seconds for which a connection may be idle, or send headers; ``limits`` are those of
    :class:`GatewayApp`.
    """

    def __init__(self, settings: Gateway, *, keep_alive: float = KEEP_ALIVE_SECONDS, **limits: Any) -> None:
        self.settings = settings
        self._app = GatewayApp(settings, **limits)
        self._keep_alive = keep_alive
        self._server: ServerThread | None = None
        self._port = settings.port

    @property
    def counts(self) -> dict[str, int]:
        """What happened to the requests so far, by name: ``{"answered": 12, "client_left": 1}``."""
        return dict(+self._app.counts)

    async def open(self, episode: AgentEpisode) -> AgentClient:
        """Answer the requests of an episode from now on.

        Raises:
            ValueError: the port cannot be opened.
        """
        if self._server is None:
            listener = _listen(self.settings)
            self._port = listener.getsockname()[1]
            self._server = ServerThread(self._app.app, listener, "gateway", self._keep_alive)
        name, key = secrets.token_hex(8), f"sk-{secrets.token_hex(KEY_BYTES)}"
        self._app.open_episode(name, key, episode, RequestImages(episode.store, self.settings))
        return AgentClient(f"{self._url()}/t/{name}", key)

    def close_episode(self, client: AgentClient) -> None:
        """End the episode's requests that are in flight, and refuse later ones. Without effect after the first time."""
        if self._server is not None:
            self._server.thread.loop.call_soon_threadsafe(self._app.close_episode, client.url.rpartition("/")[2])

    def close(self) -> None:
        """Close all episodes, and end the server and its thread."""
        server, self._server = self._server, None
        if server is None:
            return
        server.thread.wait(self._close_all())
        server.close()

    async def _close_all(self) -> None:
        for name in list(self._app.opened):
            self._app.close_episode(name)

    def _url(self) -> str:
        if self.settings.public_url is not None:
            return self.settings.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return url_of(host, self._port)


def _listen(settings: Gateway) -> socket.socket:
    try:
        return open_port(settings.host, settings.port)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"gateway.address {settings.address} cannot be used ({reason}): choose another one."
        ) from error
