"""Servers that fail in unusual ways, come back as another version, or are closed while requests wait for them."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from itertools import pairwise

import pytest
from aiohttp import web
from testing.fake_sglang import FakeSGLang
from testing.fakes import PAD, make_item
from testing.sglang_engines import engine_of, out_of_service, plain, serving, until

from vlmrl.config import ServerSettings
from vlmrl.engine.base import EngineError, Request, paused
from vlmrl.engine.image_files import EncodedImage
from vlmrl.engine.server import Launch, LocalProcess, Server
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.sglang.backend import SGLangBackend

pytestmark = pytest.mark.slow


@pytest.fixture
def fake():
    made = FakeSGLang()
    yield made
    made.close()


@pytest.fixture
def engine(fake):
    made = engine_of(fake)
    yield made
    made.close()


def test_a_server_is_watched_and_revived_again_after_an_error_of_any_kind(fake, engine, caplog):
    [server] = engine.servers.all
    errors = [KeyError("a mistake in the code of a recipe"), RuntimeError("\x1b[2J"), None]

    async def resync(server):
        if error := errors.pop(0):
            raise error

    engine.servers.resync = resync

    async def fail():
        await serving(engine)
        await out_of_service(engine, fake)
        fake.sick = False
        await until(lambda: server.ready)
        return await engine.generate(plain())

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(fail()).token_ids == fake.response
    shown = [record.exc_info[0] for record in caplog.records if "cannot serve" in record.message]
    assert shown == [KeyError, RuntimeError] and server.last_error == ""
    assert r"RuntimeError: \x1b[2J" in caplog.text and "\x1b" not in caplog.text


def test_a_server_that_refuses_the_weights_gets_them_again_after_a_pause(fake):
    """A failed transfer asks for the next check: they were sent up to sixty times a second."""
    engine, times = engine_of(fake, health_every=0.5), []

    async def resync(server):
        times.append(time.monotonic())
        if len(times) < 4:
            server.failed(times[-1])
            raise EngineError("the server refuses the weights")

    engine.servers.resync = resync

    async def fail():
        await serving(engine)
        await out_of_service(engine, fake)
        fake.sick = False
        await until(lambda: engine.servers.all[0].ready)

    asyncio.run(fail())
    engine.close()
    assert min(later - earlier for earlier, later in pairwise(times)) >= 0.5


def test_a_server_that_failed_in_a_pause_is_resumed_before_it_counts_as_dead(fake):
    """It answers no health check while it is paused, also if the check had begun before."""
    engine = engine_of(fake, health_timeout=1e9)
    [server] = engine.servers.all

    async def fail():
        await serving(engine)
        for begins_before in (False, True):
            async with paused(engine):
                assert fake.paused
                if begins_before:
                    engine.servers.paused = False  # as before the pause: the check begins
                    await until(lambda: server.unresponsive)
                    engine.servers.paused = True
                await engine.thread.run(engine.servers.drain(server))
            await until(lambda: server.ready)
            assert not fake.paused

    asyncio.run(fail())
    engine.close()


def test_a_server_that_comes_back_as_an_older_version_does_not_serve(fake):
    engine = engine_of(fake)
    pool, [server] = engine.servers, engine.servers.all

    async def restart():
        await serving(engine)
        await out_of_service(engine, fake)
        fake.info["version"], fake.sick = "0.5.9", False
        await until(lambda: "0.5.9" in server.last_error)
        waiting = asyncio.create_task(engine.generate(plain()))
        with pytest.raises(
            EngineError, match=r"no SGLang server has served .*is SGLang 0\.5\.9, but it must be 0\.5\.23 or newer"
        ):
            await engine.thread.run(pool.pick(None, patience=0.1))
        assert not server.ready and fake.bodies_of("/generate") == []
        fake.info["version"] = "0.5.24"
        return await waiting

    try:
        assert asyncio.run(restart()).token_ids == fake.response
    finally:
        engine.close()


@pytest.mark.parametrize("info", [["a list"], "a string", None])
def test_a_server_that_reports_nonsense_about_itself_is_an_engine_error(fake, engine, info):
    fake.info = info
    with pytest.raises(EngineError, match="reports about itself"):
        asyncio.run(engine.start())


def test_a_server_that_reports_nothing_about_itself_is_an_engine_error(fake, engine):
    fake.dropping = {"/server_info"}
    with pytest.raises(EngineError, match="reported nothing about itself within"):
        asyncio.run(engine.start())


def test_a_program_without_such_a_report_is_an_engine_error(fake, engine):
    fake.failing = {"/server_info"}
    with pytest.raises(
        EngineError, match=r"reports nothing about itself \(is it another program\?\): ServerError: .*HTTP 500"
    ):
        asyncio.run(engine.start())


@pytest.mark.parametrize("fails_at", ["start", "serve"])
def test_servers_do_not_serve_where_the_trainer_cannot_be_offloaded(fake, fails_at):
    """Before they start: a server sizes its KV cache by what is free then."""
    pool, well = ServerPool(SGLangBackend(ServerSettings(urls=(fake.url,))), [Server(fake.url)], colocated=True), [True]
    engine = ServerEngine(pool, object(), [], offload_trainer=lambda: well[0])

    async def start():
        for step in ("start", "serve"):
            well[0] = step != fails_at
            if well[0]:
                await getattr(engine, step)()
                continue
            with pytest.raises(EngineError, match="cannot serve: the trainer has failed"):
                await getattr(engine, step)()
            return

    try:
        asyncio.run(start())
        assert pool.ready == []
    finally:
        engine.close()


def test_requests_of_a_closed_engine_are_engine_errors(fake, monkeypatch):
    engine = engine_of(fake)

    async def encoded_late(item):
        await until(lambda: engine.servers._session.closed)
        return EncodedImage(b'"data:,"', "00")

    monkeypatch.setattr(engine._images, "encode", encoded_late)

    async def close():
        await serving(engine)
        fake.hangs = True
        preparing = asyncio.create_task(engine.generate(Request("p", [PAD], [make_item("red", 1)])))
        in_flight = asyncio.create_task(engine.generate(plain("in flight")))
        await until(lambda: fake.bodies_of("/generate"))
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(plain("waiting")))
        await until(lambda: len(engine._requests) == 3)
        await asyncio.to_thread(engine.close)
        late = engine.generate(plain("late"))
        return await asyncio.gather(preparing, in_flight, waiting, late, return_exceptions=True)

    errors = asyncio.run(close())
    assert [type(error) for error in errors] == [EngineError] * 4
    assert all("the engine was closed" in str(error) for error in errors)
    fake.release_requests()


class Redirecting(FakeSGLang):
    """Sends every request about weights to ``target``."""

    target = ""

    async def _serve(self, request: web.Request) -> web.Response:
        if request.path == "/generate" and self.target:
            return web.Response(status=307, headers={"Location": self.target})
        return await super()._serve(request)


def test_a_server_that_redirects_to_another_host_gets_nothing_fetched_there(fake):
    evil = Redirecting()
    engine = engine_of(evil, retries=0)
    evil.target = f"{fake.url}/generate"
    try:
        with pytest.raises(EngineError, match="HTTP 307"):
            asyncio.run(_start_and_generate(engine))
        assert fake.calls == []
    finally:
        engine.close()
        evil.close()


async def _start_and_generate(engine):
    await serving(engine)
    return await engine.generate(plain())


class Chatty(FakeSGLang):
    async def _generate(self, body):
        return web.Response(text="<html>busy</html>")

    async def _health(self, body):
        return web.Response(text="OK")


def test_a_response_that_is_no_json_is_a_failed_attempt_and_health_needs_none():
    chatty = Chatty()
    engine = engine_of(chatty, retries=1)
    try:
        with pytest.raises(EngineError, match=r"in 2 attempts: ServerError: .*the response is not JSON: '<html>busy"):
            asyncio.run(_start_and_generate(engine))
        assert engine.retried == 2
    finally:
        engine.close()
        chatty.close()


class Compressing(FakeSGLang):
    """Its answer is compressed, whatever the request accepts."""

    async def _serve(self, request: web.Request) -> web.Response:
        response = await super()._serve(request)
        if request.path == "/generate":
            assert request.headers["Accept-Encoding"] == "identity"
            response.headers["Content-Encoding"] = "gzip"
            response.body = gzip.compress(response.body)
        return response


def test_a_compressed_response_is_not_decompressed():
    """A MiB of zeros' compression is a GiB: it held up all servers' requests for seconds."""
    fake = Compressing()
    engine = engine_of(fake, retries=0)
    try:
        with pytest.raises(EngineError, match=r"in 1 attempts: ServerError: .*the response is not JSON"):
            asyncio.run(_start_and_generate(engine))
    finally:
        engine.close()
        fake.close()


def test_a_program_that_does_not_exist_is_named_in_the_servers_log(tmp_path):
    process = LocalProcess(Launch(["/no/python", "-m", "sglang"], {}, tmp_path / "log"))
    process.start()
    while process.alive:
        time.sleep(0.01)
    assert "/no/python cannot be run: No such file or directory" in process.log_tail()
    process.stop()
