"""LoRA adapters that are exchanged on servers while requests are on their way to them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from testing.fake_sglang import FakeSGLang
from testing.fakes import PAD, make_item
from testing.sglang_engines import engine_of, out_of_service, plain, synced, until

from vlmrl.engine.base import EngineError, Request, SamplingParams, paused

pytestmark = pytest.mark.slow

ADAPTER = {"base.lora_A": torch.zeros(2, 2)}


@pytest.fixture
def fake():
    made = FakeSGLang(pad=PAD)
    yield made
    made.close()


@pytest.fixture
def engine(fake):
    """One attempt per request: an exchange is no failure."""
    made = engine_of(fake, retries=0)
    yield made
    made.close()


async def exchange(sync, version):
    async with paused(sync.engine):
        await sync.push_adapter(ADAPTER, {"r": 2}, version)
    await until(lambda: sync.engine.servers.ready)


def test_an_adapter_exchanged_while_an_image_is_encoded_is_not_asked_for(fake, engine, tmp_path, monkeypatch):
    encode, may_encode, encoding = engine._images.encode, threading.Event(), threading.Event()

    async def slowly(item):
        encoding.set()
        assert await asyncio.to_thread(may_encode.wait, 600)
        return await encode(item)

    monkeypatch.setattr(engine._images, "encode", slowly)

    async def update():
        sync = await synced(engine, tmp_path)
        await exchange(sync, 1)
        response = asyncio.create_task(engine.generate(Request("t", [PAD], [make_item("red", 4)], SamplingParams(8))))
        await asyncio.to_thread(encoding.wait, 600)
        await exchange(sync, 2)
        await until(lambda: len(fake.adapters) == 1)  # the first one is unloaded
        may_encode.set()
        return await response

    assert asyncio.run(update()).policy_versions == [2, 2, 2]
    [body] = fake.bodies_of("/generate")
    assert body["lora_path"] == engine.adapter


def test_a_request_that_arrives_after_its_adapter_was_unloaded_is_sent_again_for_the_new_one(fake, engine, tmp_path):
    async def update():
        sync = await synced(engine, tmp_path)
        await exchange(sync, 1)
        fake.hangs = True  # the server looks for a request's adapter when it takes it out of its queue
        response = asyncio.create_task(engine.generate(plain()))
        await until(lambda: fake.bodies_of("/generate"))
        await exchange(sync, 2)
        await until(lambda: len(fake.adapters) == 1)
        fake.release_requests()
        return await response

    assert asyncio.run(update()).policy_versions == [2, 2, 2]
    first, second = fake.bodies_of("/generate")
    assert (first["lora_path"] != second["lora_path"]) and second["lora_path"] == engine.adapter
    assert engine.retried == 0 and engine.servers.all[0].backoff == 0.0


def test_a_server_that_lost_the_adapter_gets_it_again_before_it_serves(fake, tmp_path):
    engine = engine_of(fake, retries=1)

    async def lose():
        sync = await synced(engine, tmp_path)
        await exchange(sync, 1)
        fake.adapters.clear()  # as after a restart behind the run's back
        return await engine.generate(plain())

    try:
        assert asyncio.run(lose()).policy_versions == [1, 1, 1]
        assert engine.retried == 1
    finally:
        engine.close()


def test_a_server_that_recovers_with_its_adapter_serves_again(fake, tmp_path):
    engine = engine_of(fake)

    async def recover():
        sync = await synced(engine, tmp_path)
        await exchange(sync, 1)
        server = await out_of_service(engine, fake)
        fake.sick = False
        await until(lambda: server.ready)
        return await engine.generate(plain())

    try:
        assert asyncio.run(recover()).policy_versions == [1, 1, 1]
    finally:
        engine.close()


def test_another_refusal_is_an_error_whatever_happened_to_the_adapter(fake, engine, tmp_path):
    async def update():
        sync = await synced(engine, tmp_path)
        await exchange(sync, 1)
        fake.statuses = [400]
        await engine.generate(plain())

    with pytest.raises(EngineError, match="HTTP 400: set by the test"):
        asyncio.run(update())
    assert len(fake.bodies_of("/generate")) == 1
