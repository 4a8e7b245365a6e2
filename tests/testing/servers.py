"""Servers for tests: an ASGI app in a thread, on a free port of the loopback address, stopped when the test ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(app: Any, port: int | None = None, **settings: Any) -> Iterator[str]:
    """Serve an app; the value is its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'vlmrl[serve]'")
    port = port or free_port()
    config = uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1, **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
