"""A busy env server loses no session: its responses wait in a queue, and signs of life tell its clients so."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from aiohttp import web
from PIL import Image
from testing.episodes import a_task, play, turn_loop
from testing.servers import answering, served

from vlmrl import Env, RemoteEnv, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.remote import env_server
from vlmrl.env.remote.env_server import EnvServer, create_env_app
from vlmrl.env.remote.serialize import serialize_task
from vlmrl.env.session import EnvSession
from vlmrl.multimodal import embedded
from vlmrl.utils.kept import Kept
from vlmrl.utils.work_pool import WorkPool

pytestmark = pytest.mark.slow
LIMIT = 600.0
START = {"task": serialize_task(a_task()), "max_turns": 3, "tool_format": "json"}


class Frames(Env):
    """Shows a red frame after each response; fails at ``break``."""

    def step(self, response_text: str):
        if response_text == "break":
            raise OSError("the browser is gone")
        return obs("", images=[Image.new("RGB", (64, 32), "red")]), False, {"reward": 0.0}

    def finish(self, ending: str) -> float:
        return 1.0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkPool]:
    """One thread for the server's responses."""
    threads = WorkPool("responses", 1)
    monkeypatch.setattr(env_server, "cpu_pool", lambda: threads)
    yield threads
    threads.close()


def sent(
    server: EnvServer, *requests: tuple[str, str, dict[str, Any]], before_last: Any = None
) -> list[httpx.Response]:
    """The server's answers, one after another. ``before_last`` is called before the last request."""
    answers = []
    with served(create_env_app(server)) as url, httpx.Client(base_url=url, timeout=LIMIT) as http:
        for number, (method, path, body) in enumerate(requests, start=1):
            if number == len(requests) and before_last is not None:
                before_last()
            answers.append(http.request(method, path, json=body))
    return answers


def opening(gate: threading.Event, beats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send signs of life at short intervals, and open the gate after so many."""
    original, count = web.StreamResponse.write, 0

    async def counted(response: web.StreamResponse, data: bytes) -> None:
        nonlocal count
        count += data == b"\n"
        if count == beats:
            gate.set()
        await original(response, data)

    monkeypatch.setattr(env_server, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(web.StreamResponse, "write", counted)


def test_a_response_that_waits_in_the_queue_begins_with_newlines(pool: WorkPool, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()

    def close_gate() -> None:
        opening(gate, 3, monkeypatch)
        pool._threads.submit(gate.wait, LIMIT)  # the only thread

    requests = [("PUT", "/sessions/s", START), ("POST", "/sessions/s/step", {"response": "look"})]
    start, step = sent(EnvServer(resolve_env(Frames)), *requests, before_last=close_gate)
    assert start.status_code == step.status_code == 200
    assert step.content.startswith(b"\n\n\n") and json.loads(step.content)["done"] is False


def test_an_error_after_the_first_newline_has_a_kind_and_closes_the_session(monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()

    class Slow(Frames):
        def step(self, response_text: str):
            assert gate.wait(LIMIT)
            return super().step(response_text)

    server = EnvServer(resolve_env(Slow))
    requests = [("PUT", "/sessions/s", START), ("POST", "/sessions/s/step", {"response": "break"})]
    _, step = sent(server, *requests, before_last=lambda: opening(gate, 2, monkeypatch))
    assert step.status_code == 200 and step.content.startswith(b"\n\n{")
    assert json.loads(step.content)["kind"] == "error" and "the browser is gone" in json.loads(step.content)["message"]
    assert not server.sessions


def client_error(*parts: bytes, **options: float) -> str:
    """The error of an episode whose server answers a step with ``parts``; without any, with newlines for ever."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/health") or request.method == "PUT":
            return web.Response(body=b'\n{"tools": [], "replayable": true, "messages": null}')
        if request.method == "DELETE":
            return web.Response()
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts or itertools.repeat(b"\n"):
            await response.write(part)
            await asyncio.sleep(0.001)
        return response

    with answering(answer) as url:
        return play(RemoteEnv, ["a"], options={"url": url, **options}, max_env_retries_per_turn=0).error or ""


def test_the_client_reads_such_errors():
    error = client_error(b'\n\n{"kind": "error", "message": "the browser is gone"}')
    assert error.endswith(": the browser is gone")


def test_a_server_that_only_shows_signs_of_life_is_given_up():
    assert "no whole response in 0.05 s" in client_error(longest_request=0.05)


def test_env_timeout_does_not_end_a_call_that_ends_by_itself():
    class Waits(Frames):
        ends_late_calls = True

        def step(self, response_text: str):
            assert not gone.wait(0.3)  # six times the timeout
            return obs(), True, {"reward": 1.0}

    gone = threading.Event()
    session = EnvSession(resolve_env(Waits), a_task(), max_turns=1, timeout=LIMIT, max_retries=0)

    async def step() -> bool:
        await session.start()
        session._timeout = 0.05
        try:
            return (await session.step("a")).done
        finally:
            await session.close()

    assert asyncio.run(step()) and not session.counts


def test_a_frame_that_many_sessions_show_is_encoded_once(monkeypatch: pytest.MonkeyPatch):
    encoded: list[Any] = []
    original = embedded.encode_png
    monkeypatch.setattr(embedded, "encode_png", lambda image: encoded.append(image) or original(image))
    monkeypatch.setattr(embedded, "_PNGS", Kept(2**20, len))
    server = EnvServer(resolve_env(Frames))
    starts = [("PUT", f"/sessions/{n}", START) for n in range(4)]
    steps = [("POST", f"/sessions/{n}/step", {"response": "look"}) for n in range(4)]
    answers = sent(server, *starts, *steps)[4:]
    assert len({answer.content for answer in answers}) == 1 and len(encoded) == 1


def test_no_session_is_lost_while_responses_wait_for_longer_than_the_clients_timeout(
    pool: WorkPool, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()
    opening(gate, 16 * 200, monkeypatch)  # 16 sessions, 200 signs of life each: 4 s at least
    with served(create_env_app(EnvServer(resolve_env(Frames)))) as url:
        pool._threads.submit(gate.wait, LIMIT)  # the only thread
        loop = turn_loop(RemoteEnv, lambda request, turn: "x", options={"url": url, "timeout": 3.0}, env_timeout=3.0)

        async def main() -> list[Any]:
            tasks = [a_task(id=str(number)) for number in range(16)]
            return await asyncio.gather(*(loop.play(task, task.id, f"{task.id}/00") for task in tasks))

        trajectories = asyncio.run(main())
    assert gate.is_set()
    assert [(one.ending, one.error) for one in trajectories] == [("max_turns", None)] * 16
    assert not any(one.metrics.get("env_retries") for one in trajectories)


def test_calls_that_an_async_env_makes_in_threads_and_that_hang_hold_up_no_session():
    gate, entered = threading.Event(), threading.Semaphore(0)

    def service() -> None:
        entered.release()
        assert gate.wait(LIMIT)

    class Asks(Env):
        async def reset(self):
            await asyncio.to_thread(service)

        def step(self, response_text: str):
            return obs(), True, {"reward": 1.0}

    with served(create_env_app(EnvServer(resolve_env(Asks)))) as url, httpx.Client(base_url=url, timeout=LIMIT) as http:
        count = 40  # asyncio's own executor has 32 threads at most
        with ThreadPoolExecutor(count) as clients:
            starting = [clients.submit(http.put, f"/sessions/{number}", json=START) for number in range(count)]
            try:
                assert all(entered.acquire(timeout=LIMIT / 10) for _ in starting)
            finally:
                gate.set()
        assert {start.result().status_code for start in starting} == {200}
