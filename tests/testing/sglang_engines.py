"""Server engines over fake SGLang servers: health checks are frequent, and time limits short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from testing.fake_sglang import END, FakeSGLang
from testing.fakes import PAD
from vlmrl.config import SGLang
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.server import Server
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.weight_sync.base import TransferResult, WeightUpdate
from vlmrl.weight_sync.server_sync import WeightSync

QUICK = {"health_every": 0.1, "health_timeout": 0.5, "start_timeout": 3.0}
PATIENT = {"health_every": 0.1, "health_timeout": 120.0, "start_timeout": 120.0}


class Words:
    """The part of a renderer that the engine uses."""

    image_token_id = PAD
    stop_ids = frozenset({END})


def engine_of(*fakes: FakeSGLang, token: str | None = None, **settings: Any) -> ServerEngine:
    """An engine with these servers, not started. Their initial weights are policy version 3."""
    config = SGLang(urls=tuple(fake.url for fake in fakes), **(QUICK | settings))
    servers = ServerPool(SGLangBackend(config), [Server(url, token=token) for url in config.urls])
    engine = ServerEngine(servers, Words(), banned_ids=[PAD])  # type: ignore[arg-type]
    engine.versions["default"] = 3
    return engine


async def serving(engine: ServerEngine) -> ServerEngine:
    await engine.start()
    await engine.serve()
    return engine


async def synced(engine: ServerEngine, folder: Path) -> WeightSync:
    """The engine serves the weights `w` = [1, 2] as policy version 0."""
    sync = WeightSync(engine, folder, "tensor")
    await engine.start()
    await sync.first(send([1.0, 2.0]))
    await engine.serve()
    return sync


def send(values: list[float]) -> Callable[[WeightUpdate], TransferResult]:
    """A trainer whose only weight has these values."""
    return lambda update: update.send(iter([("w", torch.tensor(values))]))


def plain(name: str = "t") -> Request:
    return Request(name, [1, 2, 3], [], SamplingParams(8))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)
