"""The gateway over HTTP: its APIs and their own clients, keys, errors, streams, what ends a request, and the end of the server."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from testing.agent_episodes import ZOOM, agent_episode, zoom_call
from testing.episodes import wait_until
from testing.gateway import HELLO, PATIENCE, Gate, png, serving, turns_of, uri
from testing.templates import real_renderer

from vlmrl.config import Gateway
from vlmrl.engine.base import EngineError
from vlmrl.gateway.chat import ChatError
from vlmrl.gateway.episode import MAX_KEYS

pytestmark = pytest.mark.slow
openai = pytest.importorskip("openai")


def test_an_openai_client_reads_a_stream():
    with serving(agent_episode([f"<think>hm</think>Look.{zoom_call(2)}"])) as served:
        client = served.client.openai()
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        chunks = list(client.chat.completions.create(**HELLO, tools=[ZOOM], **options))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "Look."
        assert [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))] == ["hm"]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert call.function.name == "zoom" and json.loads(call.function.arguments) == {"k": 2}
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        logprobs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
        assert len(logprobs[0].content) == chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices
        assert chunks[0].model == HELLO["model"] and served.server.counts == {"answered": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_newline_between_two_calls_is_no_content(path, stream):
    """Some clients take the first text of a stream for the answer, and run no tool."""
    tool = {"name": "zoom", "input_schema": {"type": "object"}} if path == "/v1/messages" else ZOOM
    with serving(agent_episode([f"<think>hm</think>\n\n{zoom_call(1)}\n{zoom_call(2)}"])) as served:
        shown = served.post(path, HELLO | {"tools": [tool], "stream": stream, "max_tokens": 99}).text
    assert shown.count("call_") >= 2 and "hm" in shown
    assert not re.findall(r'"type": "text"|text_delta', shown)
    assert set(re.findall(r'"content": ("[^"]*")', shown)) <= {'""'}


def test_an_anthropic_client_plays_an_episode_with_tools_and_images():
    pytest.importorskip("anthropic")
    episode = agent_episode([f"<think>hm</think>Look.{zoom_call(2)}", "red 猫 here"])
    tool = {"name": "zoom", "description": "Zoom in.", "input_schema": {"type": "object", "properties": {"k": {}}}}
    with serving(episode) as served:
        client = served.client.anthropic()
        data = uri(png()).partition(",")[2]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        messages = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
        options = {"model": "any", "max_tokens": 50, "tools": [tool], "system": "You look."}
        assert client.messages.count_tokens(model="any", messages=messages).input_tokens > 10
        first = client.messages.create(messages=messages, **options)
        assert first.stop_reason == "tool_use" and [block.type for block in first.content] == [
            "thinking",
            "text",
            "tool_use",
        ]
        assert first.content[0].signature  # pydantic-ai sends thoughts without one back as a message of the user
        result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [image]}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "Now?"}]},
        ]
        with client.messages.stream(messages=messages, stop_sequences=["猫"], **options) as stream:
            second = stream.get_final_message()
        assert (
            second.content[0].text == "red "
            and second.stop_reason == "stop_sequence"
            and second.stop_sequence == "猫"  # of many tokens
        )
        turns = turns_of(served, episode)
        assert len(turns) == 2 and turns[1].kept == turns[0].length
        assert [message["role"] for message in turns[1].messages] == ["tool", "user"]
        with pytest.raises(__import__("anthropic").BadRequestError, match="whole number of at least 1"):
            client.messages.create(**{**options, "max_tokens": 0}, messages=messages)


def test_keys_addresses_and_routes():
    with serving(agent_episode(["a"]), agent_episode(["b"])) as served:
        mine, other = served.clients
        assert served.post(client=mine, headers={"authorization": f"Bearer {other.api_key}"}).status_code == 401
        assert (
            served.post(headers={"authorization": "", "x-api-key": mine.api_key}).json()["choices"][0]["message"][
                "content"
            ]
            == "a"
        )
        response = served.post("/v1/completions")
        assert response.status_code == 404 and "POST /v1/chat/completions" in response.json()["error"]["message"]
        response = served.post("/v1/messages", headers={"authorization": "x"})
        assert response.status_code == 401 and response.json()["type"] == "error"
        served.server.close_episode(mine)
        while (response := served.post()).status_code != 410:  # it is closed in the server's loop
            assert response.status_code in (200, 503)
        unknown = type(mine)(mine.url[:-1] + "x", mine.api_key)
        assert served.post(client=unknown).status_code == 404
        assert served.post(client=other).status_code == 200
        assert other.openai().models.list().data[0].id == other.openai().models.retrieve("x").id == "policy"
        assert (other.openai().models.list().object, other.openai().models.retrieve("x").object) == ("list", "model")
        assert served.server.counts["wrong_key"] == 2 and served.server.counts["unknown"] == 1


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", ""])
def test_a_web_page_whose_name_points_at_the_gateway_reaches_nothing(host):
    with serving(agent_episode(["a"])) as served:
        for path in ("/v1/chat/completions", "/reward"):
            response = served.post(path, HELLO | {"reward": 1.0}, headers={"Host": host})
            assert response.status_code == 403 and "127.0.0.1 and localhost only" in response.text
        assert served.server.counts == {"host": 2} and served.server._app.opened
        assert served.post(headers={"Host": "localhost:1"}).status_code == 200
    public = Gateway(public_url="http://gateway.example")
    with serving(agent_episode(["a"]), settings=public) as served:
        served.clients[0] = replace(
            served.client, url=f"http://127.0.0.1:{served.server._port}/t/" + served.client.url.rpartition("/")[2]
        )
        assert served.post(headers={"Host": host or "x"}).status_code == 200  # its key is enough


def test_messages_that_a_template_refuses_are_the_clients_mistake(shared):
    episode = agent_episode([])
    episode.renderer = real_renderer(shared, "qwen3-vl", "qwen3_5_think")  # takes a system message in first place only
    messages = [{"role": role, "content": "hello"} for role in ("user", "system", "user")]
    with serving(episode) as served:
        for path in ("/v1/messages/count_tokens", "/v1/messages", "/v1/chat/completions"):
            response = served.post(path, {"messages": messages})
            assert response.status_code == 400 and "cannot be rendered" in response.text
        assert turns_of(served, episode) == [] and episode.failure is None


def test_a_reward_is_posted():
    episode = agent_episode([])
    with serving(episode) as served:
        assert served.post("/reward", {"reward": 0.5}).json() == {"reward": 0.5}
        assert served.post("/reward", {"reward": 1}).json() == {"reward": 1.5}
        for wrong in (None, True, "1", {}, 10**400, 1e300):
            assert served.post("/reward", {"reward": wrong}).status_code == 400
        assert served.post("/reward", {"reward": 1, "id": "x" * 257}).status_code == 400
        assert episode.posted_reward == 1.5
        for _ in range(2):  # one with an id counts once
            assert served.post("/reward", {"reward": 1.0, "id": "judge"}).json() == {"reward": 2.5}
        refused = served.post("/reward", {"reward": 1e15, "id": "much"})
        assert refused.status_code == 400 and "must not make the sum of the posted rewards exceed 1e+15" in refused.text
        assert served.post("/reward", {"reward": 1, "id": "much"}).json() == {"reward": 3.5}


def test_rewards_take_little_memory():
    """Those without an id are added up; those with one have a limit."""
    episode = agent_episode([])
    for _ in range(2):
        for number in range(MAX_KEYS):
            episode.post_reward(1.0, str(number))
            episode.post_reward(0.5)
    with pytest.raises(ChatError, match="post their sum"):
        episode.post_reward(1.0, "one more")
    assert episode.posted_reward == 2 * MAX_KEYS and len(episode._posted_keys) == MAX_KEYS


def test_a_client_that_leaves_cancels_its_request():
    for stream in (False, True):
        gate = Gate()
        episode = agent_episode(gate)
        with serving(episode, heartbeat=0.01) as served:
            body = json.dumps(HELLO | {"stream": stream}).encode()
            connection = served.connect()
            connection.sendall(served.head(len(body)) + body)
            served.run_loop.wait(gate.reached("began"), PATIENCE)
            if stream:
                assert b"200 OK" in connection.recv(1000)
            connection.close()
            served.run_loop.wait(gate.reached("cancelled"), PATIENCE)
            wait_until(lambda: served.server.counts == {"client_left": 1})
            assert turns_of(served, episode) == []


def test_a_closed_episode_ends_its_requests():
    gate = Gate()
    with serving(agent_episode(gate), heartbeat=0.01) as served:
        responses = {}

        def ask(stream: bool) -> None:
            responses[stream] = served.post(body=HELLO | {"stream": stream})

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        served.run_loop.wait(gate.reached("began", 2), PATIENCE)
        served.server.close_episode(served.client)
        for thread in threads:
            thread.join()
        assert responses[False].status_code == 410
        if responses[True].status_code == 200:  # the stream had begun
            assert '"code": "closed"' in responses[True].text
        served.run_loop.wait(gate.reached("cancelled", 2), PATIENCE)


def test_a_stream_shows_signs_of_life():
    gate = Gate()
    episode = agent_episode(gate)
    with serving(episode, heartbeat=0.01) as served:
        lines = []
        client = served.client
        headers = {"authorization": f"Bearer {client.api_key}"}
        with httpx.stream(
            "POST", client.base_url + "/chat/completions", json=HELLO | {"stream": True}, headers=headers
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
                if line.startswith(":"):
                    served.run_loop.wait(gate.open(), PATIENCE)
        assert ": heartbeat" in lines and lines[-2] == "data: [DONE]"


def test_a_budget_is_an_error_of_the_client():
    episode = agent_episode(["a"], max_turns=1)
    with serving(episode) as served:
        client = served.client.openai()
        client.chat.completions.create(**HELLO)
        with pytest.raises(openai.BadRequestError, match="has had 1 requests") as raised:
            client.chat.completions.create(**HELLO)
        assert raised.value.code == "max_turns" and episode.limit == "max_turns"
        assert served.server.counts == {"answered": 1, "invalid": 1}


def test_an_error_of_the_engine_is_not_tried_again():
    def fail(request, turn):
        raise EngineError("the engine is gone")

    episode = agent_episode(fail)
    with serving(episode) as served:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            served.client.openai().chat.completions.create(**HELLO)
        assert episode.failure == "the engine is gone"
        assert served.server.counts == {"engine": 1}  # one request: the client does not repeat it


def test_a_trajectory_has_so_many_requests_in_flight():
    gate = Gate()
    with serving(agent_episode(gate), agent_episode(["b"]), max_in_flight=1, max_waiting=2) as served:
        (mine, _) = served.server._app.opened.values()
        with ThreadPoolExecutor(3) as pool:
            posted = [pool.submit(served.post) for _ in range(3)]
            wait_until(lambda: len(mine.tasks) == 3 or served.server.counts)
            refused = served.post()
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            served.run_loop.wait(gate.reached("began"), PATIENCE)
            assert served.post(client=served.clients[1]).status_code == 200
            assert gate.began == 1
            served.run_loop.wait(gate.open(), PATIENCE)
            assert [each.result().status_code for each in posted] == [200] * 3
        assert served.server.counts == {"answered": 4, "in_flight": 1} and not mine.tasks


def test_requests_that_wait_for_others_end_with_the_trajectory():
    gate = Gate()
    with serving(agent_episode(gate), max_in_flight=1) as served:
        (mine,) = served.server._app.opened.values()
        with ThreadPoolExecutor(3) as pool:
            posted = [pool.submit(served.post) for _ in range(3)]
            wait_until(lambda: len(mine.tasks) == 3 or served.server.counts)
            body = json.dumps(HELLO).encode()
            with served.connect() as left:
                left.sendall(served.head(len(body)) + body)
                wait_until(lambda: len(mine.tasks) == 4 or served.server.counts)
            wait_until(lambda: served.server.counts == {"client_left": 1})
            served.server.close_episode(served.client)
            assert [each.result().status_code for each in posted] == [410] * 3
        assert gate.began <= 1


def test_an_agent_may_send_more_requests_at_once_than_are_in_flight():
    """Its client repeats a refused request twice, within seconds, which are less than responses take."""
    gate = Gate()
    with serving(agent_episode(gate, max_turns=100)) as served:
        (mine,) = served.server._app.opened.values()
        with ThreadPoolExecutor(70) as pool, served.client.openai(max_retries=0) as client:
            sent = [pool.submit(client.chat.completions.create, **HELLO) for _ in range(70)]
            wait_until(lambda: len(mine.tasks) == 70 or served.server.counts)
            assert served.post("/reward", {"reward": 0.5}).status_code == 200
            served.run_loop.wait(gate.open(), PATIENCE)
            assert {each.result().choices[0].message.content for each in sent} == {gate.text}
        assert served.server.counts == {"answered": 70}


def test_the_server_leaves_no_thread_and_no_port():
    with serving(agent_episode(["a"])) as served:
        served.post()
        connection = served.connect()  # idle
    assert connection.recv(1) == b""
    assert not [thread for thread in threading.enumerate() if thread.name == "vlmrl-gateway"]
    with pytest.raises(ConnectionRefusedError):
        served.connect()
    served.server.close()  # without effect


def test_a_port_in_use_is_named():
    with serving(agent_episode(["a"])) as served:
        port = int(served.client.url.split(":")[2].partition("/")[0])
        with (
            pytest.raises(ValueError, match=f"gateway.address 127.0.0.1:{port} cannot be used"),
            serving(agent_episode([]), settings=Gateway(address=f"127.0.0.1:{port}")),
        ):
            pass


def test_what_an_agent_is_given():
    with serving(agent_episode([]), settings=Gateway(public_url="https://agents.example/")) as served:
        client = served.client
    assert client.base_url.startswith("https://agents.example/t/") and client.base_url.endswith("/v1")
    assert client.environment["ANTHROPIC_BASE_URL"] + "/reward" == client.environment["VLMRL_REWARD_URL"]
    assert client.api_key not in repr(client)
