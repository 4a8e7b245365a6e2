"""A client and a server of a remote env do not trust each other: no name of a file or an address is ever followed."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from testing.episodes import a_task, image, play
from testing.hostile import CANARY, CANARY_HOST, harmless, png_header
from testing.servers import answering, asked, served

from vlmrl import Env, RemoteEnv, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.remote import env_server, serialize
from vlmrl.env.remote.env_server import EnvServer, create_env_app
from vlmrl.env.remote.serialize import serialize_task
from vlmrl.env.session import EnvContractError
from vlmrl.utils import http

pytestmark = pytest.mark.slow
OWN = ("127.0.0.1",)  # the test's own server

NAMES = [
    CANARY,
    f"file://{CANARY}",
    f"FILE://{CANARY}",
    f"http://{CANARY_HOST}/a.png",
    f"HTTPS://{CANARY_HOST}/a.png",
    f"ftp://{CANARY_HOST}/a.png",
    "~/.ssh/id_rsa",
    "data:image/png,AAAA",
    f"data:{CANARY};base64,",
    {"bytes": None, "path": CANARY},
    {"$bytes": CANARY},
    {"$image": CANARY},
    {"$image": {"path": CANARY}},
    ["data:image/png;base64,AAAA"],
    None,
    7,
]


@pytest.fixture(autouse=True)
def whole_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow response begins with status 200, whatever comes: none is slow here."""
    monkeypatch.setattr(env_server, "HEARTBEAT_SECONDS", 600.0)


class Prompt(Env):
    """Starts with the task's own messages, as envs/search and GymnasiumEnv do; shows what the response names in the task."""

    def reset(self) -> list[dict[str, Any]]:
        return self.task.prompt

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs("Look:", images=[self.task.data.get(response_text, response_text)]), False, {"reward": 1.0}


def request(server: EnvServer, method: str, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    (response,) = asked(create_env_app(server), (method, path, content))
    return response


def start(server: EnvServer, **fields: Any) -> httpx.Response:
    """A session's start, by a task with these fields."""
    task = {**serialize_task(a_task()), **fields}
    return request(server, "PUT", "/sessions/s", {"task": task, "max_turns": 3, "tool_format": "json"})


def places(source: Any) -> list[dict[str, Any]]:
    """The fields of tasks that have an image source in each place where one can be."""
    part, words = {"type": "image", "image": source}, {"type": "text", "text": "?"}
    return [
        {"prompt": [{"role": "user", "content": [part, words]}]},
        {"prompt": [{"role": "system", "content": "."}, {"role": "tool", "content": [words, words, part]}]},
        {"images": [source]},
        {"images": [{"$bytes": "AAAA"}, source]},
        {"prompt": [{"role": "user", "content": [[part]]}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": part}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": source}]}]},
        {"prompt": [{"role": "user", "content": part}]},
    ]


@pytest.mark.parametrize("source", NAMES, ids=str)
def test_a_server_refuses_what_a_client_names_as_an_image(source: Any):
    server = EnvServer(resolve_env(Prompt))
    for fields in places(source):
        with harmless(fields, OWN):
            response = start(server, **fields)
        assert response.status_code == 422 and response.json()["kind"] == "error", (fields, response.text)
        assert not server.sessions


def test_the_content_of_a_file_that_a_client_names_does_not_come_back(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("TOP-SECRET")
    for fields in places(str(secret)):
        response = start(EnvServer(resolve_env(Prompt)), **fields)
        assert response.status_code != 200 and base64.b64encode(b"TOP-SECRET").decode() not in response.text


@pytest.mark.parametrize(
    "column", [CANARY, f"file://{CANARY}", f"http://{CANARY_HOST}/a", {"bytes": None, "path": CANARY}]
)
async def test_an_env_that_shows_a_column_does_not_open_what_a_client_wrote_there(column: Any):
    server = EnvServer(resolve_env(Prompt))
    body = {"task": serialize_task(a_task(data={"photo": column})), "max_turns": 3, "tool_format": "json"}
    await server.start("s", json.dumps(body).encode())
    with harmless(column), pytest.raises(ValueError, match="by a path or URL that the client sent"):
        await server.step("s", b'{"response": "photo"}')
    assert not server.sessions


def test_a_file_that_the_served_env_itself_names_is_sent_as_its_bytes(tmp_path: Path):
    buffer = io.BytesIO()
    image("green").save(buffer, format="PNG")
    (tmp_path / "map.png").write_bytes(buffer.getvalue())

    async def go() -> Any:
        server = EnvServer(resolve_env(Prompt))
        start = {"task": serialize_task(a_task()), "max_turns": 3, "tool_format": "json"}
        await server.start("s", json.dumps(start).encode())
        return await server.step("s", json.dumps({"response": str(tmp_path / "map.png")}).encode())

    part = json.loads(asyncio.run(go()))["messages"][0]["content"][0]
    assert part == {"type": "image", "image": {"$bytes": base64.b64encode(buffer.getvalue()).decode()}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "task.prompt must be a list of messages"),
        ({"prompt": [{"role": "judge", "content": "x"}]}, r"task.prompt\[0\] must be a dict with a role out of"),
        ({"prompt": [{"role": "user", "content": 5}]}, r"task.prompt\[0\].content must be text, but it is 5"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, r"half of a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "x", "name": {"$bytes": "AA=="}}]}, r"name must be text, a number"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "tool_calls must be a list"),
        ({"id": 5}, "task.id must be of type str, but it is 5"),
        ({"seed": True}, "task.seed must be of type int"),
        ({"data": []}, "task.data must be of type dict"),
        ({"images": 5}, "task.images must be a list or null"),
        ({"more": 1}, "task must have the fields"),
        ({"answer": {"$float": "1"}}, r"task.answer.\$float must be \['nan', 'inf', '-inf'\]"),
        ({"answer": {"$bytes": "!"}}, r"task.answer.\$bytes does not decode"),
        ({"answer": {"$image": "AAAA"}}, r"task.answer.\$image does not decode"),
    ],
)
def test_a_task_that_breaks_the_protocol_is_refused_by_name(change: dict[str, Any], message: str):
    response = start(EnvServer(resolve_env(Prompt)), **change)
    assert response.status_code == 422
    with pytest.raises(ValueError, match=message):
        raise ValueError(response.json()["message"])


def test_other_requests_that_break_the_protocol_are_refused():
    server = EnvServer(resolve_env(Prompt))
    whole = {"task": serialize_task(a_task()), "max_turns": 3, "tool_format": "json"}
    bodies = [b"{", b"[]", b"[" * 5000, b"\xff"]
    bodies += [json.dumps(each).encode() for each in ({}, whole | {"max_turns": "3"}, whole | {"tool_format": 5})]
    last = {"ending": "soon", "last_response": "", "last_turn": 0}
    with served(create_env_app(server)) as url, httpx.Client(timeout=60) as http:
        session = f"{url}/sessions/s"
        assert [http.put(session, content=body).status_code for body in bodies] == [422] * 7
        assert http.put(session, json=whole).status_code == 200
        assert http.post(f"{session}/step", json={"response": 5}).status_code == 422
        assert http.post(f"{session}/finish", json=last).status_code == 422
        assert list(server.sessions) == ["s"]  # a request that breaks the protocol harms no session


@pytest.mark.parametrize(("path", "field"), [("step", "response"), ("finish", "last_response"), ("finish", "ending")])
def test_a_response_longer_than_any_models_is_refused(path: str, field: str):
    server = EnvServer(resolve_env(Prompt))
    whole = {"task": serialize_task(a_task()), "max_turns": 3, "tool_format": "json"}
    body = {"response": "", "ending": "env_done", "last_response": "", "last_turn": 0, field: "a" * (2**22 + 1)}
    with served(create_env_app(server)) as url, httpx.Client(timeout=60) as http:
        assert http.put(f"{url}/sessions/s", json=whole).status_code == 200
        refused = http.post(f"{url}/sessions/s/{path}", json=body)
        assert refused.status_code == 422 and f"{field} must have at most 4194304 characters" in refused.text
        assert list(server.sessions) == ["s"]


def test_payloads_are_encoded_and_decoded_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return call

    for name in ("serialize_messages", "deserialize_task", "_parse", "_dump"):
        monkeypatch.setattr(env_server, name, noted(getattr(env_server, name)))
    monkeypatch.setattr(env_server, "LONG_BODY", 0)
    assert start(EnvServer(resolve_env(Prompt))).status_code == 200
    *during, _ = threads  # when the server stops, it closes the session
    assert len(during) == 4 and all("vlmrl-cpu" in name for name in during)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_decodes_to_gigabytes_is_refused_before_it_is_decoded():
    # Decoding it would say that its data is cut.
    bomb = {"$image": base64.b64encode(png_header(12_000, 12_000)).decode()}
    response = start(EnvServer(resolve_env(Prompt)), images=[bomb])
    assert response.status_code == 422 and "12000 x 12000 pixels" in response.text


def test_images_that_together_decode_to_gigabytes_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
):
    """An answer of 3 MiB took 5.6 GiB."""
    monkeypatch.setattr(serialize, "MOST_PIXELS", 3000)
    buffer = io.BytesIO()
    image(size=(32, 32)).save(buffer, format="PNG")
    part = {"type": "image", "image": {"$image": base64.b64encode(buffer.getvalue()).decode()}}
    payload = [{"role": "user", "content": [part, part]}]
    assert len(serialize.deserialize_messages(payload, "messages")[0]["content"]) == 2
    with pytest.raises(ValueError, match="messages must not show more than 3000 pixels in all, but they show 4096"):
        serialize.deserialize_messages([*payload, *payload], "messages")


@pytest.mark.parametrize("is_uri", [True, False])
def test_encoded_images_count_among_the_pixels_of_an_answer(is_uri: bool, monkeypatch: pytest.MonkeyPatch):
    """An answer of 6 KB, 60 images of 67 megapixels, took the threads that decode all episodes' images for five minutes."""
    monkeypatch.setattr(serialize, "MOST_PIXELS", 3000)
    buffer = io.BytesIO()
    image(size=(32, 32)).save(buffer, format="WEBP")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    source = f"data:image/webp;base64,{encoded}" if is_uri else {"$bytes": encoded}
    payload = [{"role": "user", "content": [{"type": "image", "image": source}] * 2}]
    broken = {"type": "image", "image": {"$bytes": base64.b64encode(b"no image").decode()}}  # the model reads why
    (shown,) = serialize.deserialize_answer([{"role": "user", "content": [*payload[0]["content"], broken]}], "messages")
    assert len(shown["content"]) == 3
    with pytest.raises(ValueError, match="messages must not show more than 3000 pixels in all, but they show 4096"):
        serialize.deserialize_answer([*payload, *payload], "messages")
    assert serialize.deserialize_messages([*payload, *payload], "messages")  # of a task of the run's own


class FakeServer:
    """Answers each path of an env server with JSON of the test's choice."""

    def __init__(self, **responses: Any) -> None:
        self.responses = {
            "health": {"tools": [], "replayable": True},
            "start": {"messages": None, "tools": [], "replayable": True},
            "step": {"messages": [], "done": True, "reward": 1.0, "metrics": {}},
            "finish": {"reward": None},
            **responses,
        }

    async def __call__(self, request: web.Request) -> web.Response:
        name = request.path.rpartition("/")[2]
        if request.method == "DELETE":
            return web.json_response({})
        response = self.responses[name if request.method != "PUT" else "start"]
        if callable(response):
            response = response()
        if isinstance(response, Answer):
            return web.Response(status=response.status, body=response.body, headers=response.headers)
        return web.Response(body=response if isinstance(response, bytes) else json.dumps(response).encode())


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] | None = None


@pytest.fixture
def played() -> Any:
    """Plays two turns against a server with these responses."""

    def go(task: Any = None, **responses: Any) -> Any:
        with answering(FakeServer(**responses)) as url:
            return play(RemoteEnv, ["a", "b"], task, options={"url": url}, max_turns=2, max_env_retries_per_turn=0)

    return go


def shown(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **message}], "done": False, "reward": 1.0, "metrics": {}}


def test_a_fake_server_that_keeps_to_the_protocol_plays(played: Any):
    trajectory = played(step=shown() | {"metrics": {"started": 1.8e18}})  # nanoseconds since 1970
    assert (trajectory.ending, trajectory.reward) == ("max_turns", 2.0)


@pytest.mark.parametrize("source", NAMES, ids=str)
def test_a_client_opens_nothing_that_a_server_names(played: Any, source: Any):
    part, words = {"type": "image", "image": source}, {"type": "text", "text": "?"}
    for content in ([part], [words, part], [[part]], part, [{"type": "text", "text": part}]):
        for responses in (
            {"step": shown(content=content)},
            {"start": {**shown(content=content), "tools": [], "replayable": True}},
        ):
            with harmless(responses, OWN):
                trajectory = played(**responses)
            assert trajectory.ending == "error" and "breaks the protocol" in trajectory.error, responses


@pytest.mark.parametrize(
    "response",
    [
        b"<html>",
        b"[" * 5000,
        [],
        {},
        {"messages": 5, "done": False, "reward": 1.0, "metrics": {}},
        {"messages": [], "done": True, "reward": 1.0, "metrics": {}, "points": [{"label": "click", "at": [[0.5]]}]},
        {**shown(), "reward": float("nan")},
        {**shown(), "reward": "much"},
        {**shown(), "reward": 10**350},
        {**shown(), "reward": 1e16},
        {**shown(), "metrics": {"x": float("inf")}},
        {**shown(), "metrics": []},
        {**shown(), "metrics": {"x": 1.7e308}},  # the mean of two is more than a float holds
        {**shown(), "metrics": {"state": 1}},
        {**shown(), "metrics": {"reward": 1}},
        {**shown(), "metrics": {str(number): 1 for number in range(1001)}},
        {**shown(), "metrics": {"x" * 201: 1}},
        {**shown(), "state": ["x"]},
        {**shown(), "state": "x" * 10_001},
        {**shown(), "points": [{"label": "x" * 10_000, "at": [[0.5, 0.5]]}]},
        {**shown(), "points": [{"label": "", "at": [[0.5, 0.5]] * 10_001}]},
        shown(note="x" * 2**22),  # no template shows it
        shown(role="developer", content="x" * 2**22),
        shown(content=[{"type": "text", "text": "x", "note": "x" * 2**22}]),
        shown(role="someone"),
        shown(role={"$bytes": "AA=="}),
        shown(content="\ud800"),
        shown(content={"type": "text", "text": "x"}),
        shown(tool_calls=[5]),
        shown(tool_calls="x"),
        Answer(404, b"no"),
        Answer(500, json.dumps({"kind": "error", "message": "\ud800" * 10_000}).encode()),
        Answer(302, headers={"location": f"http://{CANARY_HOST}/"}),
    ],
    ids=lambda response: str(response)[:60],
)
def test_a_response_that_breaks_the_protocol_fails_its_trajectory_and_no_other(played: Any, response: Any):
    with harmless(response, OWN):
        trajectory = played(step=response)
    assert trajectory.ending == "error" and trajectory.error.encode() and len(trajectory.error) < 3000


def test_names_of_metrics_have_a_limit_over_all_steps(played: Any):
    """Each has a mean in every row of the run's metrics."""
    steps = itertools.count()
    trajectory = played(step=lambda: shown() | {"metrics": {f"{next(steps)}": 1.0 for _ in range(600)}})
    assert trajectory.ending == "error" and "must be at most 1000 in all episodes" in trajectory.error
    assert len(trajectory.turns) == 1 and next(steps) == 1200


@pytest.mark.parametrize("tools", [5, [5], [{}], [{"function": {"name": 5}}], [{"name": "f", "parameters": "\ud800"}]])
def test_tools_that_break_the_protocol_are_refused(played: Any, tools: Any):
    assert "breaks the protocol" in played(start={"messages": None, "tools": tools, "replayable": True}).error
    with pytest.raises(ValueError, match=r"env_options.url: no env server answers"):
        played(health={"tools": tools, "replayable": True})


def test_only_a_step_can_ask_for_a_retry(played: Any):
    again = Answer(500, b'{"kind": "retry", "message": "again"}')
    for place in ("start", "finish"):
        trajectory = played(**{place: again})
        assert trajectory.ending == "error" and "again" in trajectory.error
    assert "RetryTurn" in played(step=again).error


def test_a_broken_contract_is_reported_as_one(played: Any):
    broken = Answer(500, b'{"kind": "contract", "message": "step must return"}')
    with pytest.raises(EnvContractError, match=r"env server http://127.*: step must return"):
        played(step=broken)


@pytest.mark.parametrize(
    "body",
    [
        b'{"kind": "error", "message": "no: TOKEN"}',
        b"no: TOKEN",
        b'{"messages": [], "done": true, "reward": "no: TOKEN", "metrics": {}}',
    ],
)
def test_a_token_that_a_server_repeats_is_in_no_error(played: Any, body: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLMRL_ENV_TOKEN", token := "sesame-open-sesame")
    for status in (200, 401, 500):
        error = played(step=Answer(status, body.replace(b"TOKEN", token.encode()))).error
        assert "no: [the key]" in error and "sesame" not in error


def test_a_response_over_the_limit_or_without_an_end_is_an_env_error(played: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "RESPONSE_LIMIT", 1000)
    assert "the response has more than 1000 bytes" in played(step=b" " * 1001).error


def test_a_task_that_cannot_be_sent_is_a_task_error(played: Any):
    for task in (a_task(data={"tags": {1}}), a_task(images=["/nowhere/a.png"])):
        trajectory = played(task)
        assert trajectory.ending == "error" and trajectory.non_retryable
        assert "cannot be sent to an env server: " in trajectory.error and "env_retries" not in trajectory.metrics
