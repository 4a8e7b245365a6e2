"""Server engines over fake SGLang servers: health checks are frequent, and a slow machine exceeds no time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from testing.fake_sglang import END, OPENING, FakeSGLang
from testing.fakes import PAD
from vlmrl.config import ServerSettings
from vlmrl.engine.base import Request, SamplingParams
from vlmrl.engine.server import Server
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import Limits, ServerPool
from vlmrl.engine.server_sync import WeightSync
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.weight_sync.base import SenderState, TransferResult, WeightUpdate

PATIENT = {"health_every": 0.1, "health_timeout": 600.0, "start_timeout": 600.0}


class Words:
    """The part of a renderer that the engine uses."""

    image_token_id = PAD
    image_opening_id = OPENING
    end_of_turn_id = END
    stop_ids = frozenset({END})


def settings_and_limits(**settings: Any) -> tuple[ServerSettings, Limits]:
    """Both from their fields."""
    limits = {each.name: settings.pop(each.name) for each in fields(Limits) if each.name in settings}
    return ServerSettings(**settings), Limits(**limits)


def engine_of(
    *fakes: FakeSGLang,
    token: str | None = None,
    routing: ExpertRouters | None = None,
    reads_files: bool = False,
    **settings: Any,
) -> ServerEngine:
    """An engine with these servers, not started. Their initial weights are policy version 3."""
    config, limits = settings_and_limits(urls=tuple(fake.url for fake in fakes), **(PATIENT | settings))
    started = [Server(url, token=token, reads_files=reads_files) for url in config.urls]
    servers = ServerPool(SGLangBackend(config), started, limits=limits)
    engine = ServerEngine(servers, Words(), banned_ids=[PAD], routing=routing)  # type: ignore[arg-type]
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


SENT = SenderState()
"""What this process has sent, as a trainer rank keeps it for a resend."""


def send(values: list[float]) -> Callable[[WeightUpdate], TransferResult]:
    """A trainer whose only weight has these values."""
    return lambda update: update.send(iter([("w", torch.tensor(values))]), SENT)


def plain(name: str = "t") -> Request:
    return Request(name, [1, 2, 3], [], SamplingParams(8))


async def out_of_service(engine: ServerEngine, fake: FakeSGLang) -> Server:
    """Let health checks of ``fake`` fail until its server is drained. It is revived when ``fake.sick`` is False again."""
    pool = engine.servers
    [server] = [each for each in pool.all if each.url == fake.url]
    others = [each for each in pool.ready if each is not server]
    patient, pool.limits = pool.limits, replace(pool.limits, health_timeout=0.1)
    await checked(engine, server, times=1)  # an earlier check has more patience
    fake.sick = True
    await until(lambda: not server.ready)
    pool.limits = patient
    for other in others:  # on a slow machine they may have exceeded the short limit, too
        await checked(engine, other, times=1)
        await until(lambda other=other: other.ready)  # type: ignore[misc]
    return server


async def checked(engine: ServerEngine, server: Server, times: int = 3) -> None:
    """Return when ``server`` was checked several times: its watcher clears the event at the beginning of each check."""

    async def request_check() -> None:
        server.check_health.set()

    for _ in range(times):
        await engine.thread.run(request_check())
        await until(lambda: not server.check_health.is_set())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.01)
