"""Back-off of servers: it counts outages, however many requests met them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from testing.fake_sglang import FakeSGLang
from testing.sglang_engines import engine_of, plain, serving, until

from vlmrl.engine import server as server_module
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import LONGEST_BACKOFF, Server


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test changes ``clock.now``."""
    fake = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


def test_all_requests_in_flight_meet_one_outage(clock):
    server = Server("http://a")
    for _ in range(1100):
        clock.now += 0.001  # their failures arrive one after the other
        server.failed(began=999.0)
    clock.now = 1000.001
    assert server.backoff == pytest.approx(0.5)
    assert server.check_health.is_set()
    clock.now = 1002.0
    server.failed(began=999.5)  # the last one notices after the back-off
    assert server.backoff == 0.0


def test_each_further_outage_doubles_the_back_off_up_to_its_bound(clock):
    server, found = Server("http://a"), []
    for _ in range(5000):
        server.failed(began=clock.now)
        found.append(server.backoff)
        clock.now += server.backoff + 0.1
    assert found[:8] == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])
    assert max(found) == pytest.approx(LONGEST_BACKOFF)


def test_a_success_ends_the_outage_also_for_failures_that_arrive_later(clock):
    server = Server("http://a")
    server.failed(began=999.0)
    server.answered()
    assert server.backoff == 0.0
    server.failed(began=999.0)
    assert server.backoff == 0.0
    clock.now += 1
    server.failed(began=1000.5)
    assert server.backoff == pytest.approx(0.5)  # a new outage


class Dying(FakeSGLang):
    """Drops the connections of all requests that it holds, once it is told to go on; then it is well."""

    async def _serve(self, request: web.Request) -> web.Response:
        if request.path == "/generate" and self.hangs:
            self.calls.append((request.path, None))
            await request.read()
            await self._going.wait()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await super()._serve(request)


@pytest.mark.slow
def test_a_server_that_drops_1100_requests_at_once_is_asked_again():
    fake = Dying()
    engine = engine_of(fake)
    fake.hangs = True

    async def outage():
        await serving(engine)
        responses = [asyncio.create_task(engine.generate(plain(f"t{i}"))) for i in range(1100)]
        await until(lambda: len(fake.bodies_of("/generate")) == 1100)
        fake.release_requests()
        return await asyncio.gather(*responses)

    try:
        assert {tuple(response.policy_versions) for response in asyncio.run(outage())} == {(3, 3, 3)}
        assert engine.retried == 1100
    finally:
        engine.close()
        fake.close()


@pytest.mark.slow
def test_a_success_after_a_failure_lets_waiting_requests_go_on(monkeypatch):
    monkeypatch.setattr(server_module, "FIRST_BACKOFF", 3600.0)
    monkeypatch.setattr(server_module, "LONGEST_BACKOFF", 3600.0)
    fake = FakeSGLang()
    engine = engine_of(fake)

    async def recover():
        await serving(engine)
        [server] = engine.servers.all
        fake.hangs = True
        held = asyncio.create_task(engine.generate(plain("held")))
        await until(lambda: fake.bodies_of("/generate"))
        fake.statuses = [500]
        retried = asyncio.create_task(engine.generate(plain("retried")))
        await until(lambda: server.backoff)
        new = asyncio.create_task(engine.generate(plain("new")))
        fake.release_requests()
        async with asyncio.timeout(600):
            return await asyncio.gather(held, retried, new)

    try:
        assert len(asyncio.run(recover())) == 3
    finally:
        engine.close()
        fake.close()


@pytest.mark.slow
def test_responses_that_cannot_be_used_extend_the_back_off(monkeypatch):
    monkeypatch.setattr(server_module, "FIRST_BACKOFF", 0.01)
    fake = FakeSGLang()
    fake.meta = {"output_token_logprobs": []}
    engine = engine_of(fake, retries=3)
    [server] = engine.servers.all
    found, failed = [], server.failed

    def recorded(began):
        failed(began)
        found.append(server._backoff)

    monkeypatch.setattr(server, "failed", recorded)

    async def generate():
        await serving(engine)
        await engine.generate(plain())

    try:
        with pytest.raises(EngineError, match="BadResponse"):
            asyncio.run(generate())
    finally:
        engine.close()
        fake.close()
    assert found == pytest.approx([0.01, 0.02, 0.04, 0.08])


@pytest.mark.slow
def test_a_server_that_is_healthy_and_answers_no_request_gets_one_at_a_time(monkeypatch):
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.0)
    well, silent = FakeSGLang(), FakeSGLang()
    engine = engine_of(well, silent)

    def counts() -> tuple[int, int]:
        return len(well.bodies_of("/generate")), len(silent.bodies_of("/generate"))

    async def play() -> None:
        await serving(engine)
        well.hangs = silent.hangs = True
        first = [asyncio.create_task(engine.generate(plain(f"a{i}"))) for i in range(8)]
        await until(lambda: counts() == (4, 4))
        well.release_requests()
        await until(lambda: sum(task.done() for task in first) == 4)
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        well.hangs = True
        later = [asyncio.create_task(engine.generate(plain(f"a{i}"))) for i in range(8)]
        await until(lambda: counts() == (11, 5))
        well.release_requests()
        await until(lambda: sum(task.done() for task in later) == 7)
        silent.release_requests()
        await asyncio.gather(*later)
        assert not any(server.silent for server in engine.servers.all)

    try:
        asyncio.run(asyncio.wait_for(play(), 600))
    finally:
        engine.close()
        well.close()
        silent.close()
