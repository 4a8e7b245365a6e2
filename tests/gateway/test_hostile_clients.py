"""Clients that die, stall, or send too much: each is answered or counted, memory is bounded, and other episodes go on."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from testing.agent_episodes import agent_episode
from testing.episodes import wait_until
from testing.gateway import HELLO, PATIENCE, Gate, png, serving, uri

from vlmrl.gateway import episode as episode_module
from vlmrl.gateway import gateway_app, request_body
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.request_body import ParsedRequest
from vlmrl.gateway.request_images import RequestImages
from vlmrl.multimodal import renderer as renderer_module
from vlmrl.multimodal.renderer import Renderer
from vlmrl.utils import work_pool
from vlmrl.utils.work_pool import WorkPool

pytestmark = pytest.mark.slow


def other_is_served(served) -> bool:
    """Whether an episode of another client is answered."""
    with suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):  # the connection was closed
        return served.post(client=served.clients[1]).status_code == 200
    return False


def others():
    return agent_episode(lambda request, turn: "fine")


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while content := connection.recv(1 << 16):
            received += content
    except ConnectionResetError:
        pass
    return bytes(received)


def test_a_body_that_never_comes_is_given_up():
    with serving(agent_episode([]), others(), body_seconds=0.1) as served, served.connect() as connection:
        connection.sendall(served.head(100) + b'{"mess')
        app = served.server._app
        wait_until(lambda: app._held or app.counts)
        app._body_seconds = PATIENCE  # for bodies that begin now
        assert other_is_served(served)
        response = read_all(connection)
        assert b" 408 " in response.splitlines()[0] and b"slow_body" in response
        assert served.server.counts == {"slow_body": 1, "answered": 1}


@pytest.mark.parametrize("sent", [b"", b"POST /t/x HTTP/1.1\r\nHost:"])
def test_headers_that_never_come_are_given_up(sent):
    with serving(others(), others(), keep_alive=0.5) as served, served.connect() as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""
        wait_until(lambda: other_is_served(served))  # a slow machine sends its headers too late, too


def test_an_idle_client_of_an_open_connection_may_not_dribble():
    body, answered = json.dumps(HELLO).encode(), False
    with serving(others(), others(), keep_alive=0.5) as served:
        while not answered:  # a slow machine sends its headers too late
            with served.connect() as connection, suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(served.head(len(body)) + body)
                answered = b" 200 " in connection.recv(1 << 16)
                connection.sendall(b"P")
                read_all(connection)  # it ends


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_reads_is_given_up(stream):
    """Its response, which no buffer of a connection holds, is left out of the trajectory."""
    episode, undelivered = others(), threading.Event()

    async def complete(request):
        return ChatResponse("r", "a" * 50_000_000, "", (), "stop", [1], ["a"], [0.0], 1)

    episode.complete, episode.undelivered = complete, lambda response: undelivered.set()
    with serving(episode, others(), write_seconds=0.1) as served, served.connect() as connection:
        body = json.dumps(HELLO | {"stream": stream}).encode()
        connection.sendall(served.head(len(body)) + body)
        assert undelivered.wait(PATIENCE)
        assert other_is_served(served)
        assert served.server.counts == {"client_left": 1, "answered": 1}


def peak() -> float:
    """MiB of memory of this process since it was last reset, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("declared", [False, True])
def test_100_mb_are_refused_before_they_are_in_memory(declared):
    def content():
        for _ in range(100):
            yield b" " * 2**20

    with serving(others(), others(), max_body=4 * 2**20) as served, served.connect() as connection:
        assert other_is_served(served)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak()
        head = served.head(100 * 2**20)
        if not declared:
            head = head.replace(f"Content-Length: {100 * 2**20}".encode(), b"Transfer-Encoding: chunked")
        try:
            connection.sendall(head)
            for chunk in content():
                connection.sendall(chunk if declared else b"100000\r\n" + chunk + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):  # what came within LINGER_SECONDS is read, and kept nowhere
            pass
        assert peak() - before < 50
        assert other_is_served(served)
        assert served.server.counts == {"large_body": 1, "answered": 2}


def test_all_bodies_together_have_a_limit():
    gate = Gate()
    with serving(agent_episode(gate), others(), max_body=2**20, max_held=2**20, room_seconds=0) as served:
        body = json.dumps(HELLO).encode()
        half = served.connect()
        half.sendall(served.head(2**20) + b" " * (2**20 - 100))
        busy = served.post(body=body + b" " * 2000, client=served.clients[1])
        while busy.status_code == 200:  # until the first body has arrived
            busy = served.post(body=body + b" " * 2000, client=served.clients[1])
        assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
        half.close()
        while not other_is_served(served):  # until the server has noticed
            pass
        assert served.server._app._held == 0


def test_a_request_waits_until_there_is_room_for_its_body():
    """Of 64 agents that sent 40 MB of screenshots at once, 11 were lost: clients repeat a request twice, within seconds."""
    with serving(others(), others(), max_body=2**20, max_held=2**20) as served, ThreadPoolExecutor(1) as clients:
        app = served.server._app
        half = served.connect()
        half.sendall(served.head(2**20) + b" " * (2**20 - 100))
        wait_until(lambda: app._held > 2**19)
        hold, refused = app._hold, []

        def watched(*request):
            try:
                hold(*request)
            except ChatError:
                refused.append(request)
                raise

        app._hold = watched
        body = json.dumps(HELLO).encode() + b" " * 600_000
        second = clients.submit(served.post, body=body, client=served.clients[1])
        wait_until(lambda: refused)
        half.close()
        assert second.result().status_code == 200
        assert served.server.counts["answered"] == 1 and "busy" not in served.server.counts


def test_the_bodies_of_one_trajectory_leave_room_to_others():
    """Sixteen requests whose last bytes never came had all of the room: all other trajectories got 503 for two minutes."""
    with (
        serving(others(), others(), max_body=2**20, max_held=4 * 2**20, room_seconds=0) as served,
        ExitStack() as stack,
    ):
        app = served.server._app
        for _ in range(4):
            half = stack.enter_context(served.connect())
            half.sendall(served.head(2**20) + b" " * (2**20 - 100))
        wait_until(lambda: app.counts["busy"] == 2 or app._held > 3.9 * 2**20)
        body = json.dumps(HELLO).encode() + b" " * 900_000
        assert served.post(body=body, client=served.clients[1]).status_code == 200
        assert served.server.counts == {"busy": 2, "answered": 1}


def test_images_that_wait_to_be_loaded_count_among_the_bodies(monkeypatch):
    """Else 64 requests of each trajectory, with 48 MiB of images each, could wait for two threads."""
    begun, loaded, load = threading.Event(), asyncio.Event(), RequestImages._load

    async def slow(own, image):
        begun.set()
        await loaded.wait()
        return await load(own, image)

    monkeypatch.setattr(RequestImages, "_load", slow)
    image = uri(png() + bytes(600_000))
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what?"}]
    with (
        serving(others(), others(), max_body=2**20, max_held=2**20, room_seconds=0) as served,
        ThreadPoolExecutor(1) as clients,
    ):
        app = served.server._app
        first = clients.submit(served.post, body={"messages": [{"role": "user", "content": parts}]})
        assert begun.wait(PATIENCE)
        refused = served.post(body=json.dumps(HELLO).encode() + b" " * 600_000, client=served.clients[1])
        served.server._server.thread.loop.call_soon_threadsafe(loaded.set)
        assert first.result().status_code == 200
        assert refused.status_code == 503 and app._held == 0


VALUES = [{} for _ in range(20_000)]  # 80 KB, which take 2.5 MiB once they are parsed
FULL_OF_VALUES = HELLO | {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": VALUES}}}]
}


def test_what_the_values_of_a_body_take_counts_until_they_are_rendered(monkeypatch):
    """3.3 MiB of values took 113 MiB, of which 64 requests of each trajectory could wait for one thread."""
    gate = Gate()
    waits, load = asyncio.Event(), RequestImages.load

    async def slow(own, messages):
        await waits.wait()
        return await load(own, messages)

    episode = agent_episode(gate, max_tokens=10**6)
    with serving(episode, others(), max_body=2**20, max_held=3 * 2**20) as served, ThreadPoolExecutor(1) as clients:
        app, loop = served.server._app, served.run_loop
        assert other_is_served(served)
        monkeypatch.setattr(RequestImages, "load", slow)
        first = clients.submit(served.post, body=FULL_OF_VALUES)
        wait_until(lambda: app._held > 2**21)
        refused = served.post(body=FULL_OF_VALUES, client=served.clients[1])
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        served.server._server.thread.loop.call_soon_threadsafe(waits.set)
        loop.wait(gate.reached("began"), PATIENCE)
        wait_until(lambda: app._held == 0)  # it is rendered, and waits for the engine only
        loop.wait(gate.open(), PATIENCE)
        assert first.result().status_code == 200


def test_a_refused_request_leaves_nothing_in_memory():
    """Its error and a future referred to each other, and kept the request until Python looked for such circles."""
    bodies = [{"messages": [user("red " * 30_000)]}, {"messages": [user("hi")], "n": 2}, FULL_OF_VALUES]
    with serving(others()) as served:
        served.post()
        gc.collect()
        gc.disable()
        try:
            assert {served.post(body=body).status_code for body in bodies} == {400}
            assert served.post("/v1/messages/count_tokens", bodies[0]).status_code == 400
            wait_until(lambda: not [each for each in gc.get_objects() if type(each) in (ParsedRequest, ChatRequest)])
        finally:
            gc.enable()


def test_a_long_body_of_a_reward_does_not_stop_the_event_loop(monkeypatch):
    threads = list[str]()
    read = gateway_app.read_json
    monkeypatch.setattr(
        gateway_app, "read_json", lambda content: threads.append(threading.current_thread().name) or read(content)
    )
    with serving(others()) as served:
        for padding in (10, 2**20):
            body = json.dumps({"reward": 1.0, "why": "x" * padding}).encode()
            assert served.post("/reward", body=body).status_code == 200
        short, long = threads
        assert long.startswith("vlmrl-cpu") and not short.startswith("vlmrl-cpu")
        assert served.server._app._held == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_models_name_has_a_limit_since_each_event_of_a_stream_repeats_it(path):
    with serving(others(), others()) as served:
        longest = served.post(path, HELLO | {"stream": True, "model": "m" * 1024, "input": "hello"})
        assert longest.status_code == 200 and len(longest.content) < 10_000
        refused = served.post(path, HELLO | {"stream": True, "model": "m" * 1025, "input": "hello"})
        assert refused.status_code == 400 and "1024 characters" in refused.text


def test_a_flood_of_requests_is_answered():
    with serving(others(), others(), max_in_flight=4) as served, ThreadPoolExecutor(32) as pool:
        statuses = [response.status_code for response in pool.map(lambda _: served.post(), range(200))]
        assert set(statuses) <= {200, 400, 429} and 200 in statuses  # 400: rollout.max_turns
        assert other_is_served(served)


def nested(levels: int) -> bytes:
    return b'{"messages": ' + b"[" * levels + b"]" * levels + b"}"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


LONG_HISTORY = {"messages": [user(f"message {number}") for number in range(10_000)]}
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{n}", "description": "It does.", "parameters": {"type": "object"}}}
    for n in range(1000)
]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (nested(900), 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 10_000 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 1000 + b"}", 400),
        (b'{"messages": [], "messages": [{"role": "user", "content": "hi"}]}', 200),
        (b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}', 200),
        (json.dumps(LONG_HISTORY).encode(), 200),
        (json.dumps(HELLO | {"tools": TOOLS}).encode(), 200),
    ],
    ids=lambda value: f"{value[:30]!r}" if isinstance(value, bytes) else str(value),
)
def test_a_strange_body_is_answered(body, status):
    episode = agent_episode(lambda request, turn: "fine", max_tokens=1_000_000)
    with serving(episode, others()) as served:
        response = served.post(body=body)
        assert response.status_code == status, response.text
        assert (status == 200) == ("error" not in response.json())
        assert other_is_served(served) and episode.failure is None


def test_count_tokens_refuses_a_long_text_without_encoding_it(monkeypatch):
    sizes: list[int] = []
    encode = renderer_module.ids_of_text
    monkeypatch.setattr(
        renderer_module, "ids_of_text", lambda backend, text: sizes.append(len(text)) or encode(backend, text)
    )
    episode = others()
    with serving(episode, others()) as served:
        response = served.post("/v1/messages/count_tokens", {"messages": [user("red " * 3_000_000)]})
        assert response.status_code == 400 and "rollout.max_tokens is 4000" in response.text
        assert max(sizes, default=0) < 1000 and episode.limit is None  # it was no request for a response
        assert served.post("/v1/messages/count_tokens").json()["input_tokens"] > 5


def test_long_requests_of_one_episode_leave_threads_to_others(monkeypatch):
    """Of two threads one is free for the image of another episode, while count_tokens keeps the other."""
    pool = WorkPool("cpu-of-test", 2)
    monkeypatch.setattr(work_pool, "_POOLS", [pool])
    begun, shown, in_time = threading.Event(), threading.Event(), list[bool]()
    episode = others()
    render = Renderer.prompt

    def slow(own, *args, **options):
        if threading.current_thread().name.startswith("vlmrl-cpu-of-test"):
            begun.set()
            in_time.append(shown.wait(PATIENCE))
        return render(own, *args, **options)

    monkeypatch.setattr(Renderer, "prompt", slow)
    parts = [{"type": "image_url", "image_url": {"url": uri(png())}}, {"type": "text", "text": "what?"}]
    with serving(episode, others()) as served, ThreadPoolExecutor(4) as clients:
        long = {"messages": [user("red " * 5000)]}
        counts = [clients.submit(served.post, "/v1/messages/count_tokens", long) for _ in range(4)]
        assert begun.wait(PATIENCE)
        response = served.post(body={"messages": [{"role": "user", "content": parts}]}, client=served.clients[1])
        shown.set()
        assert response.status_code == 200
        assert {count.result().status_code for count in counts} <= {200, 400} and all(in_time)
    pool.close()


def test_what_a_template_shows_to_no_model_has_a_limit_too(monkeypatch):
    """It has no tokens, and is kept and logged with its turn: six requests made a line of the log that no command reads."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 900})}}
    kept = [{"reasoning_content": "hm " * 300}, {"tool_calls": [call]}]
    episode = agent_episode(lambda request, turn: "fine")

    def body(number: int, times: int = 1):
        asked = [{"role": "user", "content": f"{number}"}]
        return {"messages": [*asked, *[{"role": "assistant", "content": "", **kept[number % 2]}] * times, *asked]}

    monkeypatch.setattr(request_body, "MAX_BESIDE", 1500)
    monkeypatch.setattr(episode_module, "MAX_BESIDE", 4000)
    with serving(episode) as served:
        for number in range(2):
            refused = served.post(body=body(number, times=2))
            assert refused.status_code == 400 and "at most 1500 characters of reasoning and calls" in refused.text
        assert [served.post(body=body(number)).status_code for number in range(4)] == [200] * 4
        refused = served.post(body=body(4))
        assert refused.status_code == 400 and "an episode keeps at most 4000 characters of reasoning" in refused.text
        assert served.post().status_code == 200
    episode.finish()
    assert len(episode.trajectory.turns) == 5 and episode.failure is None


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_calls_and_tools_of_many_values_are_refused(field):
    """Writing them as JSON holds the interpreter: 3 MB of `1e308,` in a call stopped all episodes for 5 s, then for 1.5 s."""
    values = [1e308] * 20_000
    function = {"name": "f", "arguments": json.dumps({"a": values})}
    calls = [{"id": f"c{number}", "type": "function", "function": function} for number in range(2)]
    assistant = {"role": "assistant", "content": "", "tool_calls": calls}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": values * 2}}}
    more = (
        {"messages": [*HELLO["messages"], assistant, *HELLO["messages"]]} if field == "messages" else {"tools": [tool]}
    )
    with serving(others(), others()) as served:
        response = served.post(body=HELLO | more)
        assert response.status_code == 400
        assert f"{field} must have at most 32768 values" in response.json()["error"]["message"]
        assert other_is_served(served)


def test_what_is_no_http_is_refused():
    with serving(others(), others()) as served, served.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        assert b" 400 " in read_all(connection)
        assert other_is_served(served)


def test_a_websocket_is_refused():
    with serving(others(), others()) as served, served.connect() as connection:
        request = b"GET /t/x/v1 HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        connection.sendall(request + b"Sec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
        assert b" 404 " in connection.recv(1 << 16).splitlines()[0]
        assert other_is_served(served)
