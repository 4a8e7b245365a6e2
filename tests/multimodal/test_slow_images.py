"""Slow and broken images hold up nobody else: the store's deadlines, its queue, and addresses that do not answer."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image
from testing.clocks import pass_time
from testing.episodes import a_task, turn_loop
from testing.fakes import qwen_vl
from transformers import Qwen2VLImageProcessor

from vlmrl import Env, Trajectory, obs
from vlmrl.families.base import Size
from vlmrl.families.qwen3_vl import Qwen3VL
from vlmrl.multimodal.store import MediaStore
from vlmrl.rollout.runner import Runner
from vlmrl.utils.http import http_loop
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.work_pool import WorkPool

LIMIT = 600.0  # seconds, for a machine that is ten times too slow


def color(name: str) -> Image.Image:
    return Image.new("RGB", (64, 32), name)


def store_with(transform: Callable[[Image.Image], Image.Image], pool: WorkPool | None = None) -> MediaStore:
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    processor = Qwen2VLImageProcessor(patch_size=16, temporal_patch_size=2, merge_size=2, size=size)
    return MediaStore(qwen_vl(), processor, transform=transform, pool=pool or WorkPool("media", 1))


class Gate:
    """A transform that blocks on red images until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, image: Image.Image) -> Image.Image:
        if image.getpixel((0, 0)) == (255, 0, 0):
            self.entered.set()
            assert self.open.wait(LIMIT)
        return image


async def until(event: threading.Event) -> None:
    assert await DaemonPool("wait").run(event.wait, LIMIT)


class One(Env):
    def step(self, response_text: str):
        return obs(), True, {"reward": 1.0}


# The queue


def test_env_timeout_does_not_include_the_queue_for_the_stores_threads():
    gate, pool = Gate(), WorkPool("media", 1)
    loop = turn_loop(One, lambda request, turn: "x", group_size=1, env_timeout=LIMIT)
    loop.store = store_with(gate, pool)

    async def main():
        red = asyncio.create_task(loop.store.get(color("red"), math.inf))
        await until(gate.entered)
        tasks = [a_task("?", [color(name)], id=name) for name in ("blue", "green", "black")]
        played = [asyncio.create_task(loop.play(task, task.id, f"{task.id}/00")) for task in tasks]
        while len(pool._waiting) < 3:
            await asyncio.sleep(0.001)
        for each in (asyncio.get_running_loop(), http_loop().loop):
            pass_time(each)
        await http_loop().run(asyncio.sleep(0.001))  # it has passed
        gate.open.set()
        await red
        return await asyncio.gather(*played)

    assert [(trajectory.ending, trajectory.error) for trajectory in asyncio.run(main())] == [("env_done", None)] * 3


def test_requests_for_an_image_that_is_being_made_hold_no_thread():
    gate = Gate()
    store = store_with(gate, WorkPool("media", 2))

    async def main():
        red = [asyncio.create_task(store.get(color("red"), LIMIT)) for _ in range(8)]
        await until(gate.entered)
        async with asyncio.timeout(LIMIT / 3):
            blue = await store.get(color("blue"), LIMIT)
        assert not any(task.done() for task in red)
        gate.open.set()
        return blue, await asyncio.gather(*red)

    blue, red = asyncio.run(main())
    assert len({id(item) for item in red}) == 1 and blue is not red[0]
    assert store.processed == 2


# Addresses


class Web:
    """A server on 127.0.0.1. ``/drip`` never ends; nothing else is there."""

    def __init__(self) -> None:
        web = self
        self.paths: list[str] = []
        self.dripping, self.end = threading.Event(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.paths.append(self.path)
                if self.path == "/drip":
                    return self.drip()
                self.send_error(404)

            def drip(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
                web.dripping.set()
                try:
                    while not web.end.wait(0.01):
                        self.wfile.write(b"x")
                except OSError:  # the client has closed the connection
                    pass

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.end.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    yield web
    web.close()


@pytest.mark.slow
def test_slow_addresses_hold_up_no_other_image(web: Web):
    store = store_with(lambda image: image)

    async def main():
        slow = [asyncio.create_task(store.get(f"{web.url}/drip", LIMIT)) for _ in range(8)]
        await until(web.dripping)
        async with asyncio.timeout(LIMIT / 3):
            item = await store.get(color("blue"), LIMIT)
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        return item

    assert asyncio.run(main()).num_tokens == 2
    assert web.paths == ["/drip"]  # one request for all eight


@pytest.mark.slow
def test_one_dripping_row_costs_no_other_group(web: Web):
    loop = turn_loop(
        One, lambda request, turn: "x", group_size=4, max_failed_fraction=1.0, env_timeout=LIMIT, max_refills=0
    )
    loop.store = store_with(lambda image: image)
    good = [a_task("?", [color(name)], id=name) for name in ("red", "green", "blue")]
    tasks, ended = iter([a_task("?", [f"{web.url}/drip"], id="drips"), *good]), []

    def on_end(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == 4 * len(good):
            assert web.dripping.wait(LIMIT)
            pass_time(http_loop().loop)  # the deadline of fetching

    played = asyncio.run(Runner(loop).play(tasks, 4, "x", on_end))
    assert sorted(group[0].task.id for group in played.groups) == ["blue", "green", "red"]
    assert [(trajectory.task.id, trajectory.non_retryable) for trajectory in played.failed] == [("drips", False)] * 4
    assert "/drip': no whole response within 600 s" in (played.failed[0].error or "")


@pytest.mark.slow
def test_a_task_whose_image_is_gone_is_a_data_error(web: Web):
    loop = turn_loop(One, ["x"])
    trajectory = asyncio.run(loop.play(a_task("?", [f"{web.url}/404"]), "g", "g/00"))
    assert trajectory.non_retryable and "404 Not Found" in (trajectory.error or "")


def test_decoded_images_do_not_wait_for_the_processor_while_others_are_decoded():
    """They are held at their full size, so that there may be two for each thread, however many images are requested."""
    waiting, most = 0, 0

    def decoded(image: Image.Image) -> Image.Image:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        for _ in range(40):  # decoding takes longer than the loop needs to pass the image before this one on
            http_loop().wait(asyncio.sleep(0), LIMIT)
        return image

    class Counts(Qwen3VL):
        def image_sizes(self, processor: Any, size: Size) -> dict[str, Any]:
            nonlocal waiting
            waiting -= 1
            return super().image_sizes(processor, size)

    store = store_with(decoded)
    store._family = Counts(qwen_vl().config)

    async def main():
        return await asyncio.gather(*(store.get(Image.new("RGB", (64, 32), (0, 0, blue))) for blue in range(12)))

    assert len({id(item) for item in asyncio.run(main())}) == 12
    assert waiting == 0 and most <= 2
