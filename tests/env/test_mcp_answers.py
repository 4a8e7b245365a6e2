"""What an MCP server may answer: too much, compressed, without an end. One trajectory fails, with its reason."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from testing.episodes import decoded, play
from testing.servers import served

pytest.importorskip("mcp", reason="needs mcp: pip install 'vlmrl[mcp]'")

from vlmrl import McpEnv
from vlmrl.env import mcp, mcp_stdio
from vlmrl.env.json_size import JsonSize

pytestmark = pytest.mark.slow
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
TOOL = {"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}
Answer = Callable[[web.Request, dict[str, Any]], Any]


class Adder(McpEnv):
    def judge(self, response: str) -> float:
        return 1.0


def texts(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The response to a call of a tool."""
    blocks = [{"type": "text", "text": text} for text in texts]
    return {"jsonrpc": "2.0", "id": message["id"], "result": {"content": blocks}}


def played(
    call: Answer,
    pages: int = 1,
    listen: Callable[[web.Request], Any] | None = None,
    tools: Any = (TOOL,),
    responses: Sequence[str] = (CALL, "done"),
) -> Any:
    """An episode with a server that answers a call as ``call`` does, and lists its ``tools`` on so many pages. With ``listen`` it has
    a session, and answers every GET so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and listen is not None:
            listened: web.StreamResponse = await listen(request)
            return listened
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if "method" not in message:  # an answer to a request of the server's own
            return web.Response(status=202)
        method, body = message["method"], {"jsonrpc": "2.0", "id": message.get("id")}
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            about = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "a", "version": "1"},
            }
            return web.json_response({**body, "result": about}, headers={"Mcp-Session-Id": "s"} if listen else {})
        if method == "tools/list":
            page = int(message.get("params", {}).get("cursor", 1))
            more = {"nextCursor": str(page + 1)} if page < pages else {}
            return web.json_response({**body, "result": {"tools": list(tools), **more}})
        if method == "tools/call":
            response: web.StreamResponse = await call(request, message)
            return response
        return web.Response(status=202 if "id" not in message else 404)

    app = web.Application()
    app.router.add_route("*", "/mcp", answer)
    with served(app, is_guarded=False) as url:
        options = {"server": f"{url}/mcp"}
        return play(Adder, responses, options=options, max_turns=len(responses), max_env_retries_per_turn=0)


async def short(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(texts(message, "3"))


async def without_end(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:  # until the client leaves
        await response.write(b" " * 2**16)


async def many_events(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """Each would write to the clipboard of a terminal that shows its name."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(100):
        await response.write(b"event: \x1b]52;c;AAAA\x07\ndata: a\n\n" * 100)
    await response.write(b"data: " + json.dumps(texts(message, "3")).encode() + b"\n\n")
    return response


async def many_short_lines(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """A carriage return ends a line of a stream, too."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"event: x\rdata: a\r\r" * 1000)
    await response.write(b"data: " + json.dumps(texts(message, "3")).encode() + b"\n\n")
    return response


async def many_objects(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(texts(message, *["a"] * 1000))


async def many_values(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """Small values that hold no object: parsing them holds the interpreter, and takes a hundred times their size."""
    body = {**texts(message), "result": {"content": [], "structuredContent": {"a": [[]] * 5000}}}
    return web.json_response(body)


async def many_objects_in_an_event(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    blocks = {**texts(message), "result": {"content": [{}] * 1001}}
    await response.write(b"data: " + json.dumps(blocks).encode() + b"\n\n")
    return response


async def a_long_text(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(texts(message, "a" * 600, "a" * 600))


async def text_with_the_signs_of_values(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(texts(message, '"{[,\\' * 25))


async def a_long_number(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """36 MB of such numbers held the interpreter for 9 s: writing one takes a time that grows with the square of its length."""
    body = {**texts(message), "result": {"content": [], "structuredContent": {"a": [1, 10**400]}}}
    return web.json_response(body)


async def an_unknown_block(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """Of 60 MB, the text of the client's error was written for 5 s, which held up all episodes."""
    return web.json_response({**texts(message), "result": {"content": [{"type": "film", "data": "a" * 100}]}})


async def no_message(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"a": "a" * 2000})


async def compressed(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    body = gzip.compress(json.dumps(texts(message, "a" * 2**24)).encode())
    assert len(body) < 2**16
    return web.Response(body=body, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})


async def elsewhere(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": "http://canary.vlmrl.invalid/mcp"})


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (without_end, "it has more than 1048576 bytes"),
        (many_events, "it has more than 1000 lines"),
        (many_short_lines, "it has more than 1000 lines"),
        (many_objects, "it has more than 1000 objects"),
        (many_objects_in_an_event, "it has more than 1000 objects"),
        (many_values, "it has more than 4000 values"),
        (a_long_number, "it has more than 400 digits in a number"),
        (
            an_unknown_block,
            "tool add: content.0.TextContent.text: Field required; content.0.TextContent.type: Input should be 'text'",
        ),
        (no_message, "it is no message of JSON-RPC"),
        (a_long_text, "its texts have more than 1000 characters in all"),
        (compressed, "it is compressed (gzip), although the request forbids that"),
        (elsewhere, "Redirect to http://canary.vlmrl.invalid/mcp not followed"),
    ],
)
def test_an_answer_over_the_limits_fails_its_trajectory_with_the_reason(
    call: Answer, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    limits = {"MAX_ANSWER": 2**20, "MAX_OBJECTS": 1000, "MAX_LINES": 1000, "MAX_VALUES": 4000, "MAX_TEXT": 1000}
    monkeypatch.setattr(mcp_stdio, "LONG_TEXT", 1000)
    for name, most in limits.items():
        monkeypatch.setattr(mcp, name, most)
    trajectory = played(call)
    assert trajectory.ending == "error" and reason in trajectory.error
    printed = [record for record in caplog.records if record.name.startswith(("mcp", "client"))]
    assert not printed  # without a handler, warnings are printed as they are


def test_signs_within_a_text_are_no_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MAX_VALUES", 60)
    monkeypatch.setattr(mcp, "MAX_OBJECTS", 20)
    assert played(text_with_the_signs_of_values).reward == 1.0


def test_the_charset_in_a_header_is_not_read():
    """A header of 98 KB took 11 s, in which no other episode went on: the parser of its parameters takes quadratic time."""

    async def in_utf_8(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=punycode"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(texts(message, "3")).encode() + b"\n\n")
        return response

    trajectory = played(in_utf_8)
    assert trajectory.reward == 1.0, trajectory.error


@pytest.mark.parametrize(("count", "error"), [(10, None), (11, "it has set more than 20 cookies")])
def test_a_server_sets_few_cookies(count: int, error: str | None):
    """One that set some thousands with each page of tools made each request take seconds in the event loop."""
    sent = []

    async def with_cookies(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        sent.append(len(request.cookies))
        response = web.json_response(texts(message, "3"))
        for number in range(count):
            response.set_cookie(f"c{len(sent)}-{number}", "1")
        return response

    trajectory = played(with_cookies, responses=[CALL, CALL, "done"])
    assert sent == [0, count]  # a load balancer needs them
    assert (trajectory.reward, error is None) == (1.0, True) or error in trajectory.error


def test_an_answer_of_tiny_chunks_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    """Half a million chunks of a byte held up the loop for 22 s, up to 1.6 s at a time."""
    count, most = JsonSize.add, 0

    def counted(size: JsonSize, part: bytes) -> None:
        nonlocal running, most
        count(size, part)
        running += 1
        most = max(most, running)
        if running == 1:
            asyncio.get_running_loop().call_soon(begin_again)

    def begin_again() -> None:
        nonlocal running
        running = 0

    async def in_chunks(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.write(b"1\r\n \r\n" * 5000)
        await response.write(json.dumps(texts(message, "3")).encode())
        return response

    running = 0
    monkeypatch.setattr(mcp.JsonSize, "add", counted)
    assert played(in_chunks).reward == 1.0
    assert 0 < most <= 10


def test_a_server_does_not_make_the_client_listen_again_and_again(monkeypatch: pytest.MonkeyPatch):
    """It ends each stream at once, and asks for no pause before the next one."""
    heard = []

    async def listen(request: web.Request) -> web.StreamResponse:
        heard.append(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"id: 1\nretry: 0\ndata: \n\n")
        return response

    async def after_100(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        for _ in range(100):  # episodes are long: the client could listen once for each
            async with ClientSession() as session, session.get(str(request.url)):
                pass
        return await short(request, message)

    assert played(after_100, listen=listen).reward == 1.0
    assert len(heard) < 100 + 5


def test_a_server_over_http_has_few_requests_in_work(monkeypatch: pytest.MonkeyPatch):
    """The client had a task for each. Those of one answer of 500 KB stopped the loop of all async envs for 4 s."""
    tasks, original = [0], mcp.JsonSize.add

    def counted(size: JsonSize, part: bytes) -> None:
        tasks.append(len(asyncio.all_tasks()))
        original(size, part)

    async def asking(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(1000):
            ping = {"jsonrpc": "2.0", "id": f"own {number}", "method": "ping"}
            await response.write(b"data: " + json.dumps(ping).encode() + b"\n\n")
        await response.write(b"data: " + json.dumps(texts(message, "3")).encode() + b"\n\n")
        return response

    monkeypatch.setattr(mcp.JsonSize, "add", counted)
    trajectory = played(asking)
    assert trajectory.reward == 1.0, trajectory.error
    assert max(tasks) < 2 * mcp.MAX_WAITING


def test_pages_of_tools_end_at_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MAX_TOOLS", 3)
    assert played(short, pages=3).reward == 1.0
    endless = played(short, pages=10**9)
    assert endless.ending == "error" and "has more than 3 tools" in endless.error
    empty = played(short, pages=10**9, tools=())
    assert empty.ending == "error" and "has more than 3 tools, or pages of them" in empty.error


def test_a_result_is_not_compared_with_the_patterns_of_its_server():
    """The client did so in the event loop: with 40 letters, this pattern held up the whole run for ever."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}

    async def unfit(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        body = texts(message, "3")
        return web.json_response({**body, "result": {**body["result"], "structuredContent": {"a": "aaaaaaaa!"}}})

    trajectory = played(unfit, tools=[{**TOOL, "outputSchema": schema}])
    assert trajectory.reward == 1.0, trajectory.error


COMMAND_SERVER = """
import json, sys

for line in sys.stdin:
    message = json.loads(line)
    method, result = message["method"], None
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"name": "a", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif method == "tools/list":
        result = {"tools": [{"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": TEXT}], "structuredContent": {"a": VALUES}}
    if "id" in message:
        outcome = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
        answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}, ensure_ascii=False)
        sys.stdout.buffer.write(answer.encode() + b"\\n")
        sys.stdout.flush()
"""


def played_with_command(folder: Path, text: str, values: str = "[]", **limits: Any) -> Any:
    """An episode with a server that is a command, and answers a call with the values of two Python expressions."""
    (program := folder / "server.py").write_text(COMMAND_SERVER.replace("TEXT", text).replace("VALUES", values))
    options = {"server": shlex.join([sys.executable, str(program)])}
    limits |= {"max_turns": 2, "max_tokens": 300_000, "max_env_retries_per_turn": 0}
    return play(Adder, [CALL, "done"], options=options, **limits)


def test_an_answer_of_a_command_comes_in_many_parts(tmp_path: Path):
    trajectory = played_with_command(tmp_path, "'\u20ac' * 70_000 + 'end'")
    assert trajectory.ending == "env_done", trajectory.error
    assert "\u20ac" * 1000 + "end" in decoded(trajectory.turns[1].prompt_ids)


@pytest.mark.parametrize(
    ("text", "values", "reason"),
    [
        ("'x' * 70 * 2**20", "[]", "tool add: its answer has more than 67108864 bytes"),
        ("'x'", "[{}] * 10_000", "tool add: its answer has more than 10000 objects"),
        ("'x'", "[1] * 100_000", "tool add: its answer has more than 100000 values"),
        ("'x'", "[10 ** 400]", "tool add: its answer has more than 400 digits in a number"),
    ],
)
def test_an_answer_of_a_command_over_a_limit_fails_its_trajectory(tmp_path: Path, text: str, values: str, reason: str):
    """A tool that reads a file reads one of any size: 50 MB kept the event loop of all episodes busy for a minute."""
    trajectory = played_with_command(tmp_path, text, values)
    assert trajectory.ending == "error" and reason in trajectory.error


def test_a_command_that_reads_no_answers_has_few_requests_in_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The client has a task for each. Ending those of 150,000 stopped the event loop of all episodes for 4 s."""
    tasks, original = [0], mcp_stdio._message

    def counted(stdio: Any, line: bytes) -> Any:
        tasks.append(len(asyncio.all_tasks()))
        return original(stdio, line)

    played_with_command(tmp_path, "'x'")  # imports the client, which takes longer than a call may below
    monkeypatch.setattr(mcp_stdio, "_message", counted)
    ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"})
    trajectory = played_with_command(tmp_path, f"[print({ping!r}) for _ in range(20_000)] and ''", env_timeout=3)
    assert trajectory.ending == "error" and "timed out" in trajectory.error
    assert len(tasks) > mcp.MAX_WAITING, trajectory.error
    assert max(tasks) < 2 * mcp.MAX_WAITING


def test_a_command_that_reads_the_answers_may_ask_often(tmp_path: Path):
    """An answer to a request of the server makes room for another."""
    ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"})
    ask = f"[(print({ping!r}, flush=True), sys.stdin.readline()) for _ in range(300)] and 'asked'"
    trajectory = played_with_command(tmp_path, ask)
    assert not trajectory.failed and "asked" in decoded(trajectory.turns[1].prompt_ids)
