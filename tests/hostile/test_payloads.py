"""Hostile messages between processes: of env servers and their clients, retrievers and chat APIs, for judges; hostile tool schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from aiohttp import web
from testing.episodes import a_task, play
from testing.hostile import harmless, text, value
from testing.servers import answering, asked, served

from vlmrl import Env, RemoteEnv, obs
from vlmrl.engine.chat_engine import MOST_TOKENS, read_response
from vlmrl.env.base import resolve_env
from vlmrl.env.judge import _as_one_message
from vlmrl.env.remote.env_server import EnvServer, create_env_app
from vlmrl.env.remote.serialize import serialize_task
from vlmrl.env.session import EnvContractError
from vlmrl.env.tool_calls import ToolCall
from vlmrl.env.tools import problem_with
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.records import trajectory_record
from vlmrl.report.run_log import json_lines
from vlmrl.retrieval.http_retriever import parse_hits
from vlmrl.utils.http import RetryableError

pytestmark = pytest.mark.slow
OWN = ("127.0.0.1",)  # the test's own server
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PNG_URI = f"data:image/png;base64,{PNG}"
KEYWORDS = (
    "$ref",
    "$dynamicRef",
    "$id",
    "$schema",
    "$defs",
    "$anchor",
    "type",
    "enum",
    "const",
    "pattern",
    "format",
    "items",
    "prefixItems",
    "contains",
    "uniqueItems",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "propertyNames",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "minimum",
    "multipleOf",
    "maxLength",
    "dependentSchemas",
    "unevaluatedProperties",
    "unevaluatedItems",
    "nullable",
)
PATTERNS = ("^(a|a)*$", "(a+)+$", "(", "[", "\\p{L}", "(x+x+)+y", "(?=.*a)" * 20, "")


class Prompt(Env):
    """Starts with the task's messages, and shows its columns as text and as images."""

    def reset(self) -> Any:
        return self.task.prompt

    def step(self, response_text: str) -> Any:
        shown = next(iter(self.task.data.values()), None)
        return obs(response_text, images=[shown] if isinstance(shown, str | dict) else None), False, {"reward": 1.0}


def payload(rng: random.Random, depth: int = 3) -> Any:
    """A JSON value with the payload's own markers among its dicts, most of them whole."""
    if rng.random() < 0.25:
        marker, content = rng.choice((("$image", PNG), ("$bytes", "AAAA"), ("$float", "nan"), ("$dict", {"a": 1})))
        return {marker: content if rng.random() < 0.8 else rng.choice((PNG, "AAAA", "nan", value(rng, 1), "x" * 5000))}
    if depth and rng.random() < 0.4:
        return [payload(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return value(rng, depth)


def messages(rng: random.Random) -> Any:
    """Messages, most of them right."""
    if rng.random() < 0.05:
        return payload(rng)

    def part() -> Any:
        kind = rng.choice(("text", "image", "image_url")) if rng.random() < 0.2 else rng.choice(("text", "image"))
        right: Any = text(rng, 2) if kind == "text" else rng.choice(({"$image": PNG}, {"$bytes": PNG}, PNG_URI))
        return {"type": kind, kind: right if rng.random() < 0.9 else payload(rng, 2)}

    def message() -> Any:
        content: Any = rng.choice((text(rng), [part() for _ in range(rng.randint(0, 3))]))
        extra = {"tool_calls": payload(rng, 2)} if rng.random() < 0.05 else {}
        role = rng.choice(("user", "user", "tool", "assistant")) if rng.random() < 0.95 else value(rng, 0)
        return {"role": role, "content": content if rng.random() < 0.95 else payload(rng, 1), **extra}

    return [message() for _ in range(rng.randint(0, 3))]


def cut(rng: random.Random, body: Any) -> bytes:
    """A body as it is sent: mostly whole JSON."""
    content = json.dumps(body).encode()
    if rng.random() < 0.05:
        return content[: rng.randint(0, len(content))]
    if rng.random() < 0.05:
        return rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", rng.randbytes(50)))
    return content


def requests(rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """Method, path and body of a client's requests to one session."""
    task = serialize_task(a_task()) | {"prompt": messages(rng), "data": {"a": payload(rng)}}
    if rng.random() < 0.2:
        task[rng.choice((*task, "extra"))] = payload(rng)
    limit = 3 if rng.random() < 0.9 else value(rng, 1)
    yield (
        "PUT",
        "/sessions/s",
        cut(rng, {"task": task, "max_turns": limit, "tool_format": "json" if rng.random() < 0.9 else payload(rng)}),
    )
    for _ in range(2):
        yield (
            "POST",
            "/sessions/s/step",
            cut(
                rng,
                {"response": text(rng)}
                if rng.random() < 0.8
                else rng.choice(({"response": payload(rng)}, payload(rng))),
            ),
        )
    last = {"ending": "max_turns", "last_response": text(rng, 1), "last_turn": 1}
    yield "POST", f"/sessions/{rng.choice(('s', 's', 's', '%2f..'))}/finish", cut(rng, rng.choice((last, payload(rng))))
    yield rng.choice(("DELETE", "GET", "PATCH")), "/sessions/s", b""


def test_hostile_clients_of_an_env_server(hostile):
    server = EnvServer(resolve_env(Prompt), timeout=60.0)
    with served(create_env_app(server), max_body=2**20) as url, httpx.Client(base_url=url, timeout=600) as http:
        for rng in hostile("clients"):
            case = list(requests(rng))
            with harmless(case, OWN):
                for method, path, body in case:
                    response = http.request(method, path, content=body)
                    assert response.status_code in (200, 404, 405, 413, 422, 500), response
                    if response.status_code in (422, 500):
                        assert response.json()["kind"] in ("error", "contract") and response.json()["message"], (
                            response.text
                        )
                http.delete("/sessions/s")


def responses(rng: random.Random) -> dict[str, bytes]:
    """What a server returns for each kind of request."""
    tools = rng.choice(([],) * 6 + ([{"name": "f", "parameters": schema(rng)}], payload(rng)))
    name = rng.choice(("x", "x", "state", "compact", "points", text(rng, 1)))
    metrics = {name: rng.choice((1, 1, value(rng, 0)))}
    step = {"messages": messages(rng), "done": rng.random() < 0.3, "reward": 1.0, "metrics": metrics}
    if rng.random() < 0.2:
        step[rng.choice((*step, "extra"))] = payload(rng)
    start = {"messages": rng.choice((None, messages(rng))), "tools": tools, "replayable": True}
    return {
        "PUT": cut(rng, start),
        "step": cut(rng, step),
        "finish": cut(rng, {"reward": rng.choice((None, 1, payload(rng)))}),
    }


def test_hostile_env_servers(hostile):
    now: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        name = request.path.rpartition("/")[2]
        if name == "health":
            return web.json_response({"tools": [], "replayable": True})
        return web.Response(status=now["status"], body=now["case"].get(name, now["case"].get(request.method, b"")))

    with answering(answer) as url:
        for rng in hostile("env servers"):
            case = responses(rng)
            now |= {"case": case, "status": rng.choice((200,) * 7 + (500, 302, 401))}
            with harmless(case, OWN), suppress(EnvContractError):
                trajectory = play(RemoteEnv, ["a", "b"], options={"url": url}, max_turns=2)
                assert not trajectory.failed or trajectory.error
                trajectory_metrics([trajectory] * 2)
                json_lines([trajectory_record(trajectory)])


def schema(rng: random.Random, depth: int = 4) -> Any:
    """A JSON schema: keywords with values that sometimes fit them."""
    if not depth or rng.random() < 0.1:
        return value(rng, 1)
    made: dict[str, Any] = {}
    for keyword in rng.sample(KEYWORDS, rng.randint(0, 4)):
        kind = rng.randrange(4)
        if keyword in ("$ref", "$dynamicRef", "$id", "$schema") and kind:
            made[keyword] = rng.choice(
                ("#", "#/$defs/a", "#/properties/bbox", "http://canary.vlmrl.invalid/s", "file:///vlmrl-canary/s")
            )
        elif keyword == "pattern" and kind:
            made[keyword] = rng.choice(PATTERNS)
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems") and kind:
            made[keyword] = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        elif keyword in ("properties", "$defs", "dependentSchemas") and kind:
            made[keyword] = {name: schema(rng, depth - 1) for name in ("a", "bbox", "text")}
        elif keyword == "patternProperties" and kind:
            made[keyword] = {rng.choice(PATTERNS): schema(rng, depth - 1)}
        elif keyword == "type" and kind:
            made[keyword] = rng.choice(("object", "string", ["array", "null"], "number", "thing"))
        else:
            made[keyword] = schema(rng, depth - 1)
    return made


@pytest.mark.slow
def test_hostile_tool_schemas_and_arguments(hostile):
    for rng in hostile("schemas"):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema(rng)}}]
        arguments = {
            rng.choice(("a", "bbox", "text", "role")): rng.choice((value(rng), "a" * 40 + "b", "x" * 60))
            for _ in range(3)
        }
        with harmless((tools, arguments), allowed=("bounded_worker",)), suppress(RuntimeError):  # the schema is wrong
            assert isinstance(problem_with(ToolCall("f", arguments), tools), str)


def test_hostile_retrievers(hostile):
    for rng in hostile("retrievers"):
        hit = {"id": value(rng, 0), "title": text(rng, 1), "text": text(rng, 2), "image": payload(rng, 1)}
        result = rng.choice(([[hit]], [[{"document": hit, "score": value(rng, 1)}]], [[payload(rng)]], payload(rng)))
        with harmless(result), suppress(ValueError, KeyError, TypeError, OverflowError):
            for found in parse_hits(result, 1)[0]:
                (found.passage.title + found.passage.text).encode()
                assert found.passage.image is None or found.passage.image.startswith("data:image/")


def test_hostile_responses_of_a_chat_api(hostile):
    read = 0
    for rng in hostile("chat APIs"):
        call = {"id": value(rng, 1), "function": {"name": text(rng, 1), "arguments": payload(rng, 2)}}
        message = {
            "content": rng.choice((text(rng), payload(rng))),
            "tool_calls": rng.choice(([call], [], payload(rng))),
        }
        usage = {"prompt_tokens": value(rng, 1), "completion_tokens": value(rng, 1)}
        body = {"choices": [{"message": message, "finish_reason": rng.choice(("stop", value(rng)))}], "usage": usage}
        content = json.dumps(rng.choice((body, body, body, payload(rng)))).encode()
        with harmless(content), suppress(RetryableError):
            found = read_response(content)
            assert isinstance(found.message["content"], str) and json.dumps(found.message, ensure_ascii=False).encode()
            assert all(0 <= count <= MOST_TOKENS for count in (found.prompt_tokens or 0, found.response_tokens or 0))
            read += 1
    assert read


def test_hostile_responses_to_a_judge(hostile):
    tags = (
        "</conversation>",
        "</conver",
        "sation>",
        "<score>",
        "[user]",
        "\n[assis",
        "tant]\n",
        "<reference>",
        " ",
        "\n",
        "</",
        "<",
    )
    for rng in hostile("judges"):
        pieces = [rng.choice((*tags, *tags, text(rng, 1))) for _ in range(rng.randint(1, 8))]
        content: Any = "".join(pieces) if rng.random() < 0.5 else [{"type": "text", "text": piece} for piece in pieces]
        with harmless(content):
            (shown,) = _as_one_message([{"role": "assistant", "content": content}], "")
        inside = shown["text"].removeprefix("<conversation>\n[assistant]\n").removesuffix("\n</conversation>").lower()
        for tag in ("<conversation>", "</conversation>", "<reference>", "</reference>", "<score>", "</score>"):
            assert tag not in inside
        assert "[user]" not in inside and "[assistant]" not in inside


@pytest.mark.parametrize("count", [1, 1000])
def test_a_deep_body_is_refused(count: int):
    body = b'{"task": ' + b"[" * 400 * count + b"]" * 400 * count + b"}"
    (response,) = asked(create_env_app(EnvServer(resolve_env(Prompt))), ("PUT", "/sessions/s", body))
    assert response.status_code == 422
