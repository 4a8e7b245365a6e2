"""Images of requests to servers: those that a server holds are only named, and requests share the memory of the others."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from testing.fake_sglang import HOLDS_IMAGES, FakeSGLang
from testing.fakes import PAD, item_of
from testing.sglang_engines import engine_of, out_of_service, serving, until

from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.image_files import EncodedImage
from vlmrl.engine.server_backend import Attempt
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.sglang.requests import request_body
from vlmrl.types import MediaItem

TURNS = 6


def noise(seed: int, side: int = 128) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return item_of(f"noise {seed}", Image.fromarray(pixels), 4)


def request_of(items: list[MediaItem], name: str = "t") -> Request:
    return Request(name, [1, *[PAD] * len(items)], items, SamplingParams(8))


@pytest.fixture
def fakes() -> Iterator[list[FakeSGLang]]:
    made = [FakeSGLang(pad=PAD) for _ in range(2)]
    for fake in made:
        fake.info |= HOLDS_IMAGES
    yield made
    for fake in made:
        fake.close()


async def play(engine: ServerEngine, items: list[MediaItem], name: str = "t") -> list[int]:
    """An episode with one more image each turn. Returns the bytes sent by turn."""
    sent = []
    for turn in range(1, len(items) + 1):
        before = sum(server.sent_bytes for server in engine.servers.all)
        await engine.generate(request_of(items[:turn], name))
        sent.append(sum(server.sent_bytes for server in engine.servers.all) - before)
    return sent


def named(body: dict) -> list[bool]:
    return [not image.startswith(("/", "data:")) for image in body["image_data"]]


@pytest.mark.slow
@pytest.mark.parametrize("reads_files", [False, True])
def test_a_turn_sends_its_new_image_alone(fakes, reads_files):
    engine, items = engine_of(fakes[0], reads_files=reads_files), [noise(seed) for seed in range(TURNS)]

    async def episode():
        await serving(engine)
        return await play(engine, items)

    sent = asyncio.run(episode())
    bodies = fakes[0].bodies_of("/generate")
    assert [named(body) for body in bodies] == [[True] * turn + [False] for turn in range(TURNS)]
    assert fakes[0].read_images == TURNS and engine.images_encoded == TURNS
    assert sent[-1] - sent[0] < 150 * (TURNS - 1)  # a hash and a placeholder id for each image before
    engine.close()


@pytest.mark.slow
def test_a_server_that_holds_no_images_gets_all_of_them(fakes):
    fakes[0].info.pop("trust_mm_content_hashes")
    engine = engine_of(fakes[0])

    async def episode():
        await serving(engine)
        await play(engine, [noise(seed) for seed in range(3)])

    asyncio.run(episode())
    assert [named(body) for body in fakes[0].bodies_of("/generate")] == [[False] * turn for turn in (1, 2, 3)]
    engine.close()


@pytest.mark.slow
def test_images_that_the_server_has_dropped_are_sent_again_without_a_failure(fakes):
    engine, items = engine_of(fakes[0]), [noise(seed) for seed in range(3)]

    async def episode():
        await serving(engine)
        await play(engine, items[:2])
        fakes[0].images.clear()
        await engine.generate(request_of(items))
        await engine.generate(request_of(items))

    asyncio.run(episode())
    *_, refused, whole, last = fakes[0].bodies_of("/generate")
    assert [named(body) for body in (refused, whole, last)] == [[True, True, False], [False] * 3, [True] * 3]
    assert engine.retried == 0 and engine.images_encoded == 3
    engine.close()


@pytest.mark.slow
def test_a_request_that_is_refused_with_all_its_images_is_an_error(fakes):
    engine, items = engine_of(fakes[0]), [noise(0)]

    async def episode():
        await serving(engine)
        await play(engine, items)
        fakes[0].statuses = [400, 400]
        with pytest.raises(EngineError, match="set by the test"):
            await engine.generate(request_of(items))

    asyncio.run(episode())
    assert [named(body) for body in fakes[0].bodies_of("/generate")] == [[False], [True], [False]]
    engine.close()


@pytest.mark.slow
def test_another_server_gets_the_images_that_it_lacks(fakes):
    engine, items = engine_of(*fakes), [noise(seed) for seed in range(2)]

    async def episode():
        await serving(engine)
        await play(engine, items)
        first, other = sorted(fakes, key=lambda fake: -len(fake.images))
        first.statuses = [500]
        await engine.generate(request_of(items))
        return first, other

    first, other = asyncio.run(episode())
    assert (len(first.images), len(other.images), engine.images_encoded, engine.retried) == (2, 2, 2, 1)
    engine.close()


@pytest.mark.slow
def test_a_server_that_was_out_of_service_is_sent_its_images_again(fakes):
    engine, items = engine_of(fakes[0]), [noise(0)]

    async def episode():
        await serving(engine)
        await play(engine, items)
        server = await out_of_service(engine, fakes[0])
        fakes[0].images.clear()
        fakes[0].sick = False
        await until(lambda: server.ready)
        await engine.generate(request_of(items))

    asyncio.run(episode())
    assert [named(body) for body in fakes[0].bodies_of("/generate")] == [[False], [False]]
    engine.close()


@pytest.mark.slow
def test_images_are_encoded_before_the_engines_time_begins(fakes):
    engine, items = engine_of(fakes[0]), [noise(0), noise(1)]

    async def episode():
        await serving(engine)
        await engine.prepare(request_of(items))
        encoded = engine.images_encoded
        await engine.generate(request_of(items))
        return encoded

    assert asyncio.run(episode()) == engine.images_encoded == 2
    assert fakes[0].read_images == 2
    engine.close()


@pytest.mark.slow
def test_requests_in_flight_share_the_memory_of_their_images(fakes):
    fakes[0].info.pop("trust_mm_content_hashes")
    engine, items = engine_of(fakes[0]), [noise(seed, side=512) for seed in range(4)]
    count = 16

    async def at_once() -> int:
        await serving(engine)
        await engine.prepare(request_of(items))
        fakes[0].hangs_unread = True  # or the fake's own copies would be counted
        tracemalloc.start()
        tasks = [asyncio.create_task(engine.generate(request_of(items, f"t{i}"))) for i in range(count)]
        await until(lambda: fakes[0].unread == count)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        fakes[0].release_requests()
        await asyncio.gather(*tasks)
        return held

    held = asyncio.run(at_once())
    sent = sum(server.sent_bytes for server in engine.servers.all)
    assert sent > count * 4_000_000 and held < sent / 4  # four bodies, of which the sockets hold a part
    engine.close()


def test_bodies_share_their_images():
    images = [EncodedImage(json.dumps("x" * 10_000).encode(), "ab"), EncodedImage(None, "cd")]
    bodies = [
        request_body(
            Attempt(str(n), request_of([noise(0), noise(1)]), images, None, frozenset({7}), [PAD], False, "cuda")
        )
        for n in range(2)
    ]
    shared = [{id(part) for part in body.parts if len(part) > 1000} for body in bodies]
    assert shared[0] == shared[1] == {id(images[0].json)}
    read = json.loads(b"".join(bodies[0].parts))
    assert read["image_data"] == ["x" * 10_000, "by its hash"] and read["mm_content_hashes"] == [
        "sha256:ab",
        "sha256:cd",
    ]
    assert bodies[0].size == len(b"".join(bodies[0].parts)) and read["input_ids"] == [1, PAD, PAD]
