"""Keeps the servers' weights equal to the trainer's: every update, and a resync of every server that recovers.

    sync = WeightSync(engine, folder, "tensor")
    result = await sync.push(trainer.send, policy_version=3)      # inside `paused(engine)`

Each version of the weights has a name on the servers. A response names the version that sampled each token, and is rejected if that
is unknown. The transfer itself is a :class:`~vlmrl.weight_sync.base.WeightUpdate`; :class:`HttpReceiver` is the base class of all
programs' receivers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch

from vlmrl.engine.base import EngineError
from vlmrl.engine.server import TAIL, UNREACHED, Server, ServerError, suppress_unreachable
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.utils.http import HttpClient, RefusedError, RetryableError, excerpt
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.tokens import bearer
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import BUCKET_BYTES, TransferResult, WeightsRefused, WeightUpdate

Send = Callable[[WeightUpdate], TransferResult]
"""Calls :meth:`WeightUpdate.send` on the trainer ranks."""

SYNC_SECONDS = 300.0  # for one bucket: minutes on a slow network, and no longer than a hung server may delay the others
OPEN_SECONDS = 60.0  # after which an update that is still open at a server is taken for one whose sender died
OPEN_PAUSE = 0.5  # seconds between two attempts to open one


class Adapter(NamedTuple):
    """A LoRA adapter: its name on the servers, the settings of its `adapter_config.json`, its serialized weights."""

    name: str
    settings: dict[str, Any]
    weights: str


class WeightSync:
    """Sends weights to the servers of ``engine`` by ``method``, a name in :data:`~vlmrl.weight_sync.SENDERS`.

    ``bytes`` (to each server) and ``seconds`` are of the last push. ``folder`` is for methods that write files.
    """

    def __init__(self, engine: ServerEngine, folder: Path, method: str) -> None:
        self.engine = engine
        self.bytes = 0
        self.seconds = 0.0
        self.method = method
        self.bucket_bytes = BUCKET_BYTES
        self._backend = engine.backend
        self._folder = folder
        self._run = uuid.uuid4().hex[:8]
        self._numbers = count()
        self._version = ""  # of the last weights
        self._send: Send | None = None
        self._adapter: Adapter | None = None  # the last one
        self._unloading: set[asyncio.Task[None]] = set()
        self._thread = DaemonPool("weights")
        engine.servers.resync = self._resync

    async def first(self, send: Send, policy_version: int = 0) -> TransferResult:
        """Send weights to all servers, before any of them serves."""
        return await self.engine.thread.run(self._push(send, policy_version, self.engine.servers.all))

    async def push(self, send: Send, policy_version: int) -> TransferResult:
        """Send weights to all servers that serve. An unreachable one is left out, and gets them when it recovers.

        Raises EngineError if a server refuses them; then none serves before it has all of them. A cancellation aborts the transfer.
        """
        return await self.engine.thread.run(self._push(send, policy_version, None))

    async def push_adapter(
        self, weights: dict[str, torch.Tensor], settings: dict[str, Any], policy_version: int
    ) -> None:
        """Send a LoRA adapter to all servers that serve; ``settings`` as in peft's `adapter_config.json`.

        Requests in flight keep the adapter they began with. Raises EngineError if a server refuses the new one.
        """
        await self.engine.thread.run(self._push_adapter(weights, settings, policy_version))

    async def fill(self, send: Send, value: float) -> None:
        """Overwrite every weight with ``value``, so that a weight that no update reaches is noticed."""
        await self.engine.thread.run(self._overwrite(send, value))

    async def checksums(self) -> dict[str, dict[str, str]]:
        """Checksums of each server's weights, by URL, then by tensor and rank. Equal weights have equal ones.

        Raises EngineError if a server reports none.
        """
        return await self.engine.thread.run(self._checksums())

    async def _push(self, send: Send, policy_version: int, servers: Sequence[Server] | None) -> TransferResult:
        async with self.engine.servers.update_lock:
            chosen = self.engine.servers.ready if servers is None else servers
            self._version, self._send = f"{self._run}.{next(self._numbers)}", send
            self.engine.versions[self._version] = policy_version
            result = await self._transfer(chosen)
            if servers is not None:
                self._check_complete(result)
            self.bytes, self.seconds = result.bytes, result.seconds
            return result

    async def _resync(self, server: Server) -> None:
        """Send the last weights and adapter to a server that recovered. Called with ``servers.update_lock`` held."""
        result = await self._transfer([server], resend=True)
        if result.failed:
            raise EngineError(result.failed[server.url])
        if not result.bytes:
            raise EngineError(
                f"server.sync {self.method} sent no weights to a server that recovered: with `update.resend` a sender gets none, and "
                "sends those of the last update, which it has kept."
            )
        if self._adapter is not None:
            await self._load(server, self._adapter)

    async def _push_adapter(
        self, weights: dict[str, torch.Tensor], settings: dict[str, Any], policy_version: int
    ) -> None:
        servers, started = self.engine.servers, time.perf_counter()
        async with servers.update_lock:
            name, old = f"{self._run}.adapter{next(self._numbers)}", self.engine.adapter
            values = await self._thread.run(self._serialized, weights)
            self.engine.versions[name] = policy_version
            self._adapter = Adapter(name, settings, values)
            await asyncio.gather(*(self._load_or_leave_out(server, self._adapter) for server in servers.ready))
            self.engine.adapter = name
            if old is not None:
                self._unload(old)
            self.bytes, self.seconds = len(values) * 3 // 4, time.perf_counter() - started

    def _serialized(self, weights: dict[str, torch.Tensor]) -> str:
        """By value, since adapters are small, in the servers' dtype."""
        dtype = self._backend.receiver(self.engine.servers.all[0]).dtype
        on_cpu = {name: weight.detach().to("cpu", dtype or weight.dtype) for name, weight in weights.items()}
        return self._backend.serialize_adapter(on_cpu)

    async def _load(self, server: Server, adapter: Adapter) -> None:
        receiver = self._backend.receiver(server)
        call = self._backend.load_adapter(*adapter, tp=receiver.ranks)
        try:
            await self.engine.servers.call(server, *call, timeout=receiver.timeout)
        except ServerError as error:
            if not self._backend.has_adapter(error):  # a server that recovers without a restart still has it
                raise EngineError(f"a server refused the adapter: {error}") from error

    async def _load_or_leave_out(self, server: Server, adapter: Adapter) -> None:
        began = time.monotonic()
        try:
            await self._load(server, adapter)
        except UNREACHED:
            await self.engine.servers.drain(server)
            server.failed(began)

    def _unload(self, adapter: str) -> None:
        """Does not wait: a server keeps the adapter until no request uses it."""
        for server in self.engine.servers.ready:
            call = self.engine.servers.call(server, *self._backend.unload_adapter(adapter))
            task = asyncio.create_task(suppress_unreachable(call))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _overwrite(self, send: Send, value: float) -> None:
        async with self.engine.servers.update_lock:
            self._send, self._version = send, f"{self._run}.fill"
            self.engine.versions[self._version] = -1  # only the startup parity check samples from it
            self._check_complete(await self._transfer(self.engine.servers.all, fill=value))

    async def _transfer(
        self, servers: Sequence[Server], resend: bool = False, fill: float | None = None
    ) -> TransferResult:
        update = WeightUpdate(
            receivers=tuple(map(self._backend.receiver, servers)),
            sender=SENDERS[self.method],
            version=self._version,
            bucket_bytes=self.bucket_bytes,
            dtype=self._backend.receiver(self.engine.servers.all[0]).dtype,
            folder=self._folder,
            resend=resend,
            fill=fill,
        )
        assert self._send is not None
        await self.engine.restore_weights(servers)
        began = time.monotonic()
        try:
            result: TransferResult = await self._thread.run(self._send, update)
        except asyncio.CancelledError:
            update.abort()
            raise
        if result.refused:
            for server in servers:  # they may have a part of the refused weights, or all of them
                await self.engine.servers.drain(server)
            raise EngineError(f"a server refused the weights ({self.method}): {result.failed[result.refused[0]]}")
        for server in servers:
            if server.url in result.failed:
                await self.engine.servers.drain(server)
                server.failed(began)
        return result

    def _check_complete(self, result: TransferResult) -> None:
        """Raise EngineError if a server does not have the weights. At the start of a run, all must have them."""
        for server in self.engine.servers.all:
            if server.url in result.failed:
                why = f"{result.failed[server.url]}{server.log_tail()}"
                raise EngineError(f"the server {server.url} did not take the weights: {why}")

    async def _checksums(self) -> dict[str, dict[str, str]]:
        sums: dict[str, dict[str, str]] = {}
        for server in self.engine.servers.all:
            timeout = self._backend.receiver(server).timeout
            try:
                response = await self.engine.servers.call(server, *self._backend.checksums, timeout=timeout)
                ranks = enumerate(self._backend.parse_checksums(response))
                found = {f"{name} of rank {rank}": value for rank, part in ranks for name, value in part.items()}
            except (*UNREACHED, ServerError, AttributeError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}{server.log_tail()}"
                raise EngineError(f"the server {server.url} reported no checksums of its weights: {why}") from error
            sums[server.url] = found
        return sums


@dataclass
class HttpReceiver:
    """The part of a :class:`~vlmrl.weight_sync.base.WeightReceiver` that is the same for all programs: its address, calls, aborts."""

    opens: ClassVar[str] = ""
    """Path that opens an update."""
    closes: ClassVar[str] = ""

    url: str
    ranks: int = 1
    device: str = "cpu"
    dtype: torch.dtype | None = None
    timeout: float = SYNC_SECONDS
    folder_timeout: float = 600.0
    """Time limit in seconds for loading a whole folder."""
    token: str | None = field(default=None, repr=False)
    """Sent with every request."""

    def __post_init__(self) -> None:
        self._client = HttpClient(max(self.timeout, self.folder_timeout), bearer(self.token), proxies=False)

    @classmethod
    def of(cls, server: Server, folder_timeout: float) -> Self:
        """The receiver of a server that has reported about itself."""
        info = server.info
        dtype = getattr(torch, str(info.dtype), None)
        return cls(server.url, info.tp, info.device, dtype, folder_timeout=folder_timeout, token=server.token)

    def begin(self) -> None:
        """Open an update. To close one that another run is sending would leave the server with weights of both, under its name."""
        until = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                self.post(self.opens, {})
                return
            except WeightsRefused:
                if time.monotonic() >= until:
                    break
            time.sleep(OPEN_PAUSE)
        # an earlier sender died and left an update open
        self.post(self.closes, {})
        self.post(self.opens, {})

    def abort(self) -> None:
        self._client.abort()

    def post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> bytes:
        """POST as JSON. Raises WeightsRefused if the server answers with an error, OSError if it does not answer."""
        return self._call("POST", path, body, timeout)

    def get(self, path: str) -> bytes:
        """As :meth:`post`."""
        return self._call("GET", path)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> bytes:
        url = self.url + path
        try:
            status, content = self._client.send(method, url, body, seconds=timeout or self.timeout)
        except (RetryableError, RefusedError) as error:
            raise ConnectionError(f"{url}: {error}") from error
        if not 200 <= status < 300:
            raise WeightsRefused(f"{url}: HTTP {status}: {excerpt(content, TAIL)}")
        return content
