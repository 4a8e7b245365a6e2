"""Keeps servers at the trainer's weights: every update, and every server that comes back.

    sync = WeightSync(engine, config.server_settings, folder)
    sent = await sync.push(trainer.send_weights, policy_version=3)      # inside `paused(engine)`

Each set of weights has a name on the servers, and each token they sample tells it: a reply from weights with another name is
not taken. The transfer itself is in :mod:`vlmrl.weight_sync.transfer`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from vlmrl.config import ServerSettings
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import UNREACHED, Server, ServerError, quietly
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.transfer import Method, Target, TransferResult, WeightUpdate, serialized

Send = Callable[[WeightUpdate], TransferResult]
"""Carries a delivery out where the weights are: :meth:`vlmrl.train.trainer.Trainer.send_weights`, for one."""

FILL = 0.01  # in place of every weight, when it is checked that all of them arrive


class WeightSync:
    """Gives the servers of ``engine`` their weights by ``method``, unless ``config`` names one. ``folder`` is where disk writes them.

    ``bytes`` and ``seconds`` are of the last push, to each server.
    """

    def __init__(self, engine: ServerEngine, config: ServerSettings, folder: Path, method: Method = "group") -> None:
        self.engine = engine
        self.bytes = 0
        self.seconds = 0.0
        self.method: Method = method if config.sync == "auto" else config.sync
        self._config = config
        self._folder = folder
        self._run = uuid.uuid4().hex[:8]
        self._numbers = count()
        self._name = ""  # of the last weights
        self._send: Send | None = None
        self._adapter: tuple[str, dict[str, Any], str] | None = None  # the last one, as servers take it
        self._unloading: set[asyncio.Task[None]] = set()
        self._thread = DaemonPool("weights")
        engine.servers.resync = self._bring

    async def first(self, send: Send, policy_version: int = 0) -> TransferResult:
        """Weights for all servers, before any of them serves."""
        return await self.engine.thread.run(self._push(send, policy_version, self.engine.servers.all))

    async def push(self, send: Send, policy_version: int) -> TransferResult:
        """Weights for all that serve. One that cannot be reached is left out, and gets them when it comes back.

        Raises EngineError where a server refuses them.
        """
        return await self.engine.thread.run(self._push(send, policy_version, None))

    async def push_adapter(
        self, weights: dict[str, torch.Tensor], settings: dict[str, Any], policy_version: int
    ) -> None:
        """A LoRA adapter for all that serve, beside the weights they have; ``settings`` as in peft's `adapter_config.json`.

        Requests that are under way keep the adapter they began with. Raises EngineError where a server refuses it.
        """
        await self.engine.thread.run(self._push_adapter(weights, settings, policy_version))

    async def fill(self, send: Send) -> None:
        """Overwrite every weight there is with one number: what the next push does not set stays wrong, and is found."""
        await self.engine.thread.run(self._overwrite(send))

    async def checksums(self) -> dict[str, dict[str, str]]:
        """What each server's weights sum up to, by tensor and rank: servers with equal weights have equal ones."""
        return await self.engine.thread.run(self._checksums())

    async def _push(self, send: Send, policy_version: int, servers: Sequence[Server] | None) -> TransferResult:
        async with self.engine.servers.update_lock:
            chosen = self.engine.servers.ready if servers is None else servers
            self._name, self._send = f"{self._run}.{next(self._numbers)}", send
            self.engine.versions[self._name] = policy_version
            sent = await self._deliver(chosen)
            if servers is not None:
                self._all_have(sent)
            self.bytes, self.seconds = sent.bytes, sent.seconds
            return sent

    async def _bring(self, server: Server) -> None:
        """The last weights once more, for a server that came back. Called with ``servers.update_lock`` held."""
        sent = await self._deliver([server], again=True)
        if sent.failed:
            raise EngineError(sent.failed[server.url])
        if self._adapter is not None:
            await self._load(server, self._adapter)

    async def _push_adapter(
        self, weights: dict[str, torch.Tensor], settings: dict[str, Any], policy_version: int
    ) -> None:
        servers, began = self.engine.servers, time.perf_counter()
        async with servers.update_lock:
            name, old = f"{self._run}.adapter{next(self._numbers)}", self.engine.adapter
            values = await self._thread.run(_values, weights, _dtype(servers.all[0]))
            self.engine.versions[name] = policy_version
            self._adapter = name, settings, values
            await asyncio.gather(*(self._load_or_leave_out(server, self._adapter) for server in servers.ready))
            self.engine.adapter = name
            if old is not None:
                self._unload(old)
            self.bytes, self.seconds = len(values) * 3 // 4, time.perf_counter() - began

    async def _load(self, server: Server, adapter: tuple[str, dict[str, Any], str]) -> None:
        call = self.engine.backend.load_adapter(*adapter, tp=server.info.tp)
        try:
            await self.engine.servers.call(server, *call, timeout=self._config.sync_timeout)
        except ServerError as error:
            raise EngineError(f"a server refused the adapter: {error}") from error

    async def _load_or_leave_out(self, server: Server, adapter: tuple[str, dict[str, Any], str]) -> None:
        try:
            await self._load(server, adapter)
        except UNREACHED:
            await self.engine.servers.withdraw(server)
            server.failed()

    def _unload(self, adapter: str) -> None:
        """Which waits over there until nobody uses it any more."""
        for server in self.engine.servers.ready:
            call = self.engine.servers.call(server, *self.engine.backend.unload_adapter(adapter))
            task = asyncio.create_task(quietly(call))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _overwrite(self, send: Send) -> None:
        async with self.engine.servers.update_lock:
            self._send, self._name = send, f"{self._run}.fill"
            self.engine.versions[self._name] = -1  # which only a handshake asks for
            self._all_have(await self._deliver(self.engine.servers.all, fill=FILL))

    async def _deliver(self, servers: Sequence[Server], **how: Any) -> TransferResult:
        delivery = WeightUpdate(
            targets=tuple(_target(server) for server in servers),
            method=self.method,
            name=self._name,
            run=self._run,
            bucket_bytes=self._config.bucket_mb * 2**20,
            timeout=self._config.sync_timeout,
            dtype=_dtype(self.engine.servers.all[0]),
            folder=self._folder,
            **how,
        )
        assert self._send is not None
        sent: TransferResult = await self._thread.run(self._send, delivery)
        if sent.refused:
            raise EngineError(f"a server refused the weights ({self.method}): {sent.failed[sent.refused[0]]}")
        for server in servers:
            if server.url in sent.failed:
                await self.engine.servers.withdraw(server)
                server.failed()
        return sent

    def _all_have(self, sent: TransferResult) -> None:
        """At the start, that is: later on, a server that was not reached is brought up to date when it comes back."""
        for server in self.engine.servers.all:
            if server.url in sent.failed:
                raise EngineError(
                    f"the server {server.url} took no weights: {sent.failed[server.url]}{server.log_tail()}"
                )

    async def _checksums(self) -> dict[str, dict[str, str]]:
        sums: dict[str, dict[str, str]] = {}
        for server in self.engine.servers.all:
            backend, timeout = self.engine.backend, self._config.sync_timeout
            reply = await self.engine.servers.call(server, *backend.checksums, timeout=timeout)
            parts = enumerate(backend.parse_checksums(reply))
            sums[server.url] = {f"{name} of rank {rank}": value for rank, part in parts for name, value in part.items()}
        return sums


def _target(server: Server) -> Target:
    return Target(server.url, server.info.tp, server.info.device)


def _dtype(server: Server) -> torch.dtype | None:
    """What it computes in."""
    return getattr(torch, str(server.info.dtype), None)


def _values(weights: dict[str, torch.Tensor], dtype: torch.dtype | None) -> str:
    """Adapters are small, and go by value to wherever a server is."""
    return serialized({name: weight.detach().to("cpu", dtype or weight.dtype) for name, weight in weights.items()})
