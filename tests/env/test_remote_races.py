"""What clients of an env server may do at the same time: close, call twice, leave. No env is left, played twice or closed twice."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web
from testing.episodes import a_task, wait_until
from testing.servers import served

from vlmrl import Env, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.remote import env_server
from vlmrl.env.remote.env_server import EnvServer, create_env_app
from vlmrl.env.remote.serialize import serialize_task
from vlmrl.utils import http_server
from vlmrl.utils.http_server import guarded
from vlmrl.utils.work_pool import WorkPool

pytestmark = pytest.mark.slow
LIMIT = 60.0
START = {"task": serialize_task(a_task()), "max_turns": 3, "tool_format": "json"}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("PUT", "/sessions/s", START),
    ("POST", "/sessions/s/step", {"response": "a"}),
    ("POST", "/sessions/s/finish", {"ending": "max_turns", "last_response": "a", "last_turn": 1}),
]


@pytest.fixture
def whole_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow response begins with status 200, whatever comes: none is slow here."""
    monkeypatch.setattr(env_server, "HEARTBEAT_SECONDS", 600.0)


class Held(Env):
    """Waits in its method ``held`` until the gate opens."""

    held = ""
    entered: threading.Event
    gate: threading.Event
    opened: list[Env]
    closed: list[Env]
    played: list[tuple[int, str]]

    def __init_subclass__(cls) -> None:
        cls.entered, cls.gate, cls.opened, cls.closed, cls.played = threading.Event(), threading.Event(), [], [], []

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.opened.append(self)
        self.hold("__init__")

    def hold(self, method: str) -> None:
        if method == self.held:
            self.entered.set()
            assert self.gate.wait(LIMIT)

    def reset(self) -> Any:
        self.hold("reset")

    def step(self, response_text: str) -> Any:
        self.hold("step")
        self.played.append((self.turn, response_text))
        return obs(response_text), False, {"reward": 1.0}

    def finish(self, ending: str) -> Any:
        self.hold("finish")

    def close(self) -> Any:
        self.closed.append(self)


class HeldAsync(Held):
    """The same with coroutines, its constructor aside."""

    async def wait(self, method: str) -> None:
        if method == self.held:
            self.entered.set()
            await asyncio.to_thread(self.gate.wait, LIMIT)

    async def reset(self) -> Any:
        await self.wait("reset")

    async def step(self, response_text: str) -> Any:
        await self.wait("step")
        return obs(response_text), False, {"reward": 1.0}

    async def finish(self, ending: str) -> Any:
        await self.wait("finish")

    async def close(self) -> Any:
        self.closed.append(self)


@contextmanager
def serving(env: Any) -> Iterator[tuple[EnvServer, httpx.Client, ThreadPoolExecutor]]:
    server = EnvServer(resolve_env(env), timeout=LIMIT)
    with (
        served(create_env_app(server)) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as http,
        ThreadPoolExecutor() as threads,
    ):
        yield server, http, threads


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkPool]:
    """One thread for the server's responses, and for the tasks that it reads."""
    threads = WorkPool("responses", 1)
    monkeypatch.setattr(env_server, "cpu_pool", lambda: threads)
    yield threads
    threads.close()


@pytest.mark.usefixtures("whole_responses")
def test_a_session_that_is_closed_before_its_task_is_read_does_not_start(pool: WorkPool):
    class Mine(Held):
        pass

    gate = threading.Event()
    with serving(Mine) as (server, http, threads):
        pool._threads.submit(gate.wait, LIMIT)  # the only thread
        starting = threads.submit(http.put, "/sessions/s", json=START)
        wait_until(lambda: len(pool._waiting) == 1)
        assert http.put("/sessions/s", json=START).status_code == 422  # it is being started already
        assert http.delete("/sessions/s").status_code == 200
        gate.set()
        assert "session s was closed before it started" in starting.result().text
        assert not server.sessions and not Mine.opened


@pytest.mark.usefixtures("whole_responses")
@pytest.mark.parametrize("kind", [Held, HeldAsync])
@pytest.mark.parametrize(("number", "method"), [(0, "__init__"), (0, "reset"), (1, "step"), (2, "finish")])
def test_a_session_that_is_closed_during_a_call_closes_its_env_once(kind: Any, number: int, method: str):
    class Mine(kind):  # type: ignore[misc]
        held = method

    earlier = set(threading.enumerate())  # of other tests, whose envs hang
    with serving(Mine) as (server, http, threads):
        for name, path, body in REQUESTS[:number]:
            assert http.request(name, path, json=body).status_code == 200
        name, path, body = REQUESTS[number]
        call = threads.submit(http.request, name, path, json=body)
        assert Mine.entered.wait(LIMIT)
        assert http.delete("/sessions/s").status_code == 200 and not server.sessions
        Mine.gate.set()
        assert call.result().status_code == 500 and "session s was closed" in call.result().text
        wait_until(lambda: not [e for e in {*threading.enumerate()} - earlier if e.name.startswith("vlmrl-env-")])
        wait_until(lambda: Mine.closed)  # an async close outlives the env's thread
    assert Mine.closed == Mine.opened and len(Mine.opened) == 1


@pytest.mark.usefixtures("whole_responses")
@pytest.mark.parametrize(("number", "method"), [(0, "__init__"), (1, "step")])
def test_a_session_answers_one_request_at_a_time(number: int, method: str):
    class Mine(Held):
        held = method

    with serving(Mine) as (_, http, threads):
        for name, path, body in REQUESTS[:number]:
            http.request(name, path, json=body)
        name, path, body = REQUESTS[number]
        call = threads.submit(http.request, name, path, json=body)
        assert Mine.entered.wait(LIMIT)
        second = http.post("/sessions/s/step", json={"response": "b"})
        assert second.status_code == 422 and "session s answers another request" in second.text
        Mine.gate.set()
        assert call.result().status_code == 200
        assert http.post("/sessions/s/step", json={"response": "c"}).status_code == 200
    assert Mine.played == ([(0, "a"), (1, "c")] if number else [(0, "c")])
    assert len(Mine.opened) == len(Mine.closed) == 1


def test_the_body_of_a_client_that_left_counts_until_its_call_has_ended(monkeypatch: pytest.MonkeyPatch):
    class Mine(Held):
        held = "step"

    connections: list[web.Request] = []

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> web.StreamResponse:
        connections.append(request)
        return await handler(request)

    monkeypatch.setattr(http_server, "memory_bytes", lambda: 4 * 2**20)
    app = create_env_app(EnvServer(resolve_env(Mine), timeout=LIMIT))
    app.middlewares.append(watch)
    content = json.dumps({"response": "x" * 600_000}).encode()
    with served(guarded(app, None, 2**20)) as url, httpx.Client(base_url=url, timeout=LIMIT) as http:
        http.put("/sessions/s", json=START)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaving:
            head = f"POST /sessions/s/step HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            leaving.sendall(head.encode() + content)
            assert Mine.entered.wait(LIMIT)
        wait_until(lambda: connections[1].transport is None)
        assert http.put("/sessions/t", content=content).status_code == 503
        Mine.gate.set()
        wait_until(lambda: http.put("/sessions/t", content=content).status_code == 422)  # it is read, and holds no task


@pytest.mark.parametrize("limit", ["sessions", "bytes"])
@pytest.mark.parametrize("how", ["left", "late"])
@pytest.mark.parametrize("has_plain_close", [True, False])
def test_a_closed_session_counts_until_its_call_has_ended(limit, how, has_plain_close):
    """Each left a thread and a task: 1,500 PUTs and DELETEs 300 threads, and tasks of 40 MB more than a gigabyte in 20 s."""

    class Plain(Held):
        held = "step"

    class Async(Held):
        held = "step"

        async def close(self) -> None:
            pass

    env = Plain if has_plain_close else Async
    with serving(env) as (server, http, threads):
        assert http.put("/sessions/closed", json=START).status_code == 200
        opened = server.sessions["closed"]
        server.max_sessions, server.max_bytes = (
            (1, 10 * opened.size) if limit == "sessions" else (9, 3 * opened.size // 2)
        )
        if how == "late":
            opened.session._timeout = 0.05
        leaving = threads.submit(http.post, "/sessions/closed/step", json={"response": "a"})
        if how == "left":
            assert env.entered.wait(LIMIT)
            assert http.delete("/sessions/closed").status_code == 200
        assert leaving.result().status_code == 500 and not server.sessions
        refused = http.put("/sessions/next", json=START)
        assert refused.status_code == 500 and "session next cannot start" in refused.text
        env.gate.set()
        wait_until(lambda: http.put("/sessions/next", json=START).status_code == 200)
        http.delete("/sessions/next")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_counts_until_its_env_is_closed(is_async: bool):
    class Plain(Held):
        held = "close"

        def close(self) -> Any:
            self.hold("close")

    class Async(HeldAsync):
        held = "close"

        async def close(self) -> Any:
            await self.wait("close")

    env = Async if is_async else Plain
    with serving(env) as (server, http, threads):
        server.max_sessions = 1
        assert http.put("/sessions/s", json=START).status_code == 200
        leaving = threads.submit(http.delete, "/sessions/s")
        assert env.entered.wait(LIMIT)
        refused = http.put("/sessions/next", json=START)
        env.gate.set()
        assert refused.status_code == 500 and "session next cannot start" in refused.text
        assert leaving.result().status_code == 200
        wait_until(lambda: http.put("/sessions/next", json=START).status_code == 200)
