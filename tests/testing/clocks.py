"""Time that passes when a test says so: deadlines are long, so that no slow machine meets them, and are met without a wait."""

from __future__ import annotations

import asyncio

HOUR = 3600.0  # seconds: longer than any deadline of a test


def pass_time(loop: asyncio.AbstractEventLoop, seconds: float = HOUR) -> None:
    """Let all timeouts and pauses in ``loop`` that end within ``seconds`` end now. May be called in any thread."""
    loop.call_soon_threadsafe(_advance, loop, seconds)


def _advance(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
