"""Which servers an update, an adapter and a resync reach, with servers in this process that only note their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmrl.engine.base import EngineError
from vlmrl.engine.server import ServerError
from vlmrl.weight_sync.base import Bucket
from vlmrl.weight_sync.server_sync import FILL, WeightSync

BF16 = torch.bfloat16


@dataclass
class Server:
    """A server and its receiver. ``error`` is what its calls raise."""

    url: str
    error: Exception | None = None
    ranks: int = 2
    device: str = "cpu"
    dtype: torch.dtype | None = BF16
    timeout: float = 60
    versions: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failures: int = 0

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def abort(self) -> None: ...

    def receive(self, bucket: Bucket, version: str | None) -> None:
        if self.error is not None:
            raise self.error
        self.weights |= bucket.tensors()
        self.versions += [version] if version else []

    def failed(self, *began: float) -> None:
        self.failures += 1

    def log_tail(self) -> str:
        return ""


class Pool:
    """All servers serve, except ``away``."""

    def __init__(self, *servers: Server, away: tuple[Server, ...] = ()) -> None:
        self.all, self.away, self.update_lock = servers, list(away), asyncio.Lock()

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server not in self.away]

    async def withdraw(self, server: Server) -> None:
        self.away.append(server)

    async def call(self, server: Server, *call: Any, timeout: float | None = None) -> Any:
        if server.error is not None:
            raise server.error
        server.calls.append(call)
        return f"reply of {server.url}"


class Backend:
    settings = SimpleNamespace(bucket_mb=1)
    checksums = ("GET", "/checksums")

    def receiver(self, server: Server) -> Server:
        return server

    def serialize_adapter(self, weights: dict[str, torch.Tensor]) -> str:
        return ",".join(f"{name} {weight.dtype} {weight.tolist()}" for name, weight in weights.items())

    def load_adapter(self, name: str, settings: dict[str, Any], weights: str, tp: int) -> tuple[Any, ...]:
        return "load", name, settings, weights, tp

    def has_adapter(self, error: ServerError) -> bool:
        return False

    def unload_adapter(self, name: str) -> tuple[Any, ...]:
        return "unload", name

    def parse_checksums(self, reply: str) -> list[dict[str, str]]:
        return [{"w": f"{reply}, first"}, {"w": f"{reply}, second"}]


def played(tmp_path, play: Callable[[WeightSync, Pool], Awaitable[None]], *servers: Server, away=()) -> WeightSync:
    """Run ``play(sync, pool)``."""

    async def run() -> WeightSync:
        pool = Pool(*servers, away=away)
        thread = SimpleNamespace(run=lambda coroutine: coroutine)
        engine = SimpleNamespace(servers=pool, versions={}, thread=thread, backend=Backend(), adapter=None)
        sync = WeightSync(engine, tmp_path, "tensor")
        await play(sync, pool)
        return sync

    return asyncio.run(asyncio.wait_for(run(), 60))


def send(value: float):
    return lambda update: update.send(iter([("w", torch.tensor([value]))]))


def test_a_push_reaches_the_servers_that_serve_and_leaves_out_one_that_does_not_answer(tmp_path):
    well, ill, away = Server("well"), Server("ill", ConnectionResetError("gone")), Server("away")

    async def play(sync, pool):
        result = await sync.push(send(3.0), policy_version=4)
        assert result.failed == {"ill": "gone"}
        assert pool.ready == [well]

    sync = played(tmp_path, play, well, ill, away, away=(away,))
    assert well.weights["w"].tolist() == [3.0] and not ill.weights and not away.weights
    assert (ill.failures, well.failures, away.failures) == (1, 0, 0)
    assert sync.engine.versions == {well.versions[0]: 4}
    assert sync.bytes == 2


def test_a_push_waits_for_the_lock_of_updates(tmp_path):
    server = Server("one")

    async def play(sync, pool):
        async with pool.update_lock:  # as a resync holds it
            push = asyncio.create_task(sync.push(send(3.0), policy_version=1))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not server.versions and not sync.engine.versions
        await push

    played(tmp_path, play, server)
    assert len(server.versions) == 1


def test_a_recovered_server_gets_the_last_weights_and_the_adapter(tmp_path):
    server, late = Server("one"), Server("late")

    async def play(sync, pool):
        await sync.push(send(3.0), policy_version=1)
        await sync.push_adapter({"a": torch.ones(1)}, {}, policy_version=1)
        assert not late.versions and not late.calls
        await pool.resync(late)
        assert late.versions == server.versions and late.weights["w"].tolist() == [3.0]
        assert late.calls == server.calls
        late.error = ConnectionResetError("gone again")
        with pytest.raises(EngineError, match="gone again"):
            await pool.resync(late)

    played(tmp_path, play, server, late, away=(late,))


def test_an_adapter_is_sent_in_the_servers_dtype_and_takes_the_place_of_the_last_one(tmp_path):
    server = Server("one")

    async def play(sync, pool):
        await sync.push_adapter({"a": torch.tensor([1.001])}, {"r": 8}, policy_version=1)
        first = sync.engine.adapter
        await sync.push_adapter({"a": torch.tensor([2.0])}, {"r": 8}, policy_version=2)
        for _ in range(100):  # the old one is unloaded in the background
            await asyncio.sleep(0)
        second = sync.engine.adapter
        assert server.calls == [
            ("load", first, {"r": 8}, "a torch.bfloat16 [1.0]", 2),
            ("load", second, {"r": 8}, "a torch.bfloat16 [2.0]", 2),
            ("unload", first),
        ]
        assert sync.engine.versions == {first: 1, second: 2}

    played(tmp_path, play, server)


def test_a_server_that_does_not_answer_is_left_out_of_an_adapter_and_a_refusal_ends_the_run(tmp_path):
    well, ill = Server("well"), Server("ill", ConnectionResetError("gone"))

    async def play(sync, pool):
        await sync.push_adapter({"a": torch.ones(1)}, {}, policy_version=1)
        assert (pool.ready, ill.failures, len(well.calls)) == ([well], 1, 1)
        well.error = ServerError("rank too large", 400)
        with pytest.raises(EngineError, match="a server refused the adapter: rank too large"):
            await sync.push_adapter({"a": torch.ones(1)}, {}, policy_version=2)

    played(tmp_path, play, well, ill)


def test_a_fill_is_of_no_policy_version(tmp_path):
    server = Server("one", dtype=None)

    async def play(sync, pool):
        await sync.fill(send(3.0))

    sync = played(tmp_path, play, server)
    assert server.weights["w"].tolist() == pytest.approx([FILL])
    assert sync.engine.versions == {server.versions[0]: -1}


def test_checksums_are_of_every_server_tensor_and_rank(tmp_path):
    sums = {}

    async def play(sync, pool):
        sums.update(await sync.checksums())

    played(tmp_path, play, Server("one"), Server("two"))
    assert sums == {
        url: {"w of rank 0": f"reply of {url}, first", "w of rank 1": f"reply of {url}, second"}
        for url in ("one", "two")
    }
