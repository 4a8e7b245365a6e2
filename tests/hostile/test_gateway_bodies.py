"""Whatever an agent sends and the policy answers, a request ends in a response that the record can follow, or in the client's mistake.

`pytest tests/hostile/test_gateway_bodies.py --hostile 2500` tries 10,000 inputs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hostile import gateway_bodies as bodies
from testing.agent_episodes import agent_episode
from testing.episodes import renderer
from testing.gateway import serving
from testing.hostile import harmless

from vlmrl.config import Gateway
from vlmrl.engine.base import Request
from vlmrl.gateway import anthropic_api, openai_api, openai_responses_api
from vlmrl.gateway.chat import ChatError, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.request_body import ParsedRequest, read_json
from vlmrl.gateway.request_images import RequestImages
from vlmrl.gateway.request_tree import message_of_response
from vlmrl.samples import audit, emit
from vlmrl.types import Completion

OPENAI = (openai_api.read_openai_request, openai_api.openai_response, openai_api.openai_stream, openai_api.openai_error)
ANTHROPIC = (
    anthropic_api.read_anthropic_request,
    anthropic_api.anthropic_response,
    anthropic_api.anthropic_stream,
    anthropic_api.anthropic_error,
)
RESPONSES = (
    openai_responses_api.read_responses_request,
    openai_responses_api.responses_response,
    openai_responses_api.responses_stream,
    openai_api.openai_error,
)
OVER_HTTP = [
    (bodies.openai_body, ("/v1/chat/completions",)),
    (bodies.anthropic_body, ("/v1/messages", "/v1/messages/count_tokens")),
    (bodies.responses_body, ("/v1/responses",)),
]


def episode_of(rng: random.Random) -> AgentEpisode:
    """An episode whose policy says what ``rng`` chooses."""

    def say(request: Request, turn: int) -> Completion:
        renders = renderer()
        prompt = len(request.prompt_ids) + sum(item.num_tokens - 1 for item in request.media)
        ids = [*renders.encode(bodies.response(rng)), renders.end_of_turn_id]
        most = request.sampling.max_tokens
        kept = ids[:most]
        return Completion(kept, [-0.5] * len(kept), "stop" if len(ids) <= most else "length", [0] * len(kept), prompt)

    return agent_episode(say, max_response_tokens=1000, max_tokens=20_000)


async def one(rng: random.Random, body: bodies.Body, api: tuple[Callable[..., Any], ...], seen: Counter[str]) -> None:
    """Send a body, and a second request that continues the response; then the audit."""
    read, whole, stream, error_of = api
    episode = episode_of(rng)
    images, refusal = RequestImages(episode.store, Gateway()), None
    try:
        parsed: ParsedRequest = read(read_json(bodies.sent(rng, body)), images)
        chat = replace(parsed.chat, messages=await images.load(parsed.chat.messages))
        await episode.count_tokens(chat)
        response = await episode.complete(chat)
        check(response, parsed)
        assert json.loads(json.dumps(whole(parsed, response)).encode())["id"] == response.id
        for line in b"".join(stream(parsed, response)).decode().split("\n"):
            assert not line.startswith("data: {") or json.loads(line.removeprefix("data: "))
        seen["answered"] += 1
        own = message_of_response(response)
        after = [{"role": "tool", "content": "ok", "tool_call_id": call.id} for call in response.tool_calls]
        new = after or [{"role": "user", "content": "Sure?"}]
        await episode.complete(replace(chat, messages=[*chat.messages, own, *new], max_tokens=None))
        seen["continued"] += 1
        assert episode.recorder.turns[-1].received.continues == 0
    except ChatError as error:
        refusal = error
    if refusal is not None:
        seen["refused"] += 1
        assert refusal.status == 400 and 0 < len(refusal.message) < 1000, (refusal.status, refusal.message)
        json.dumps(error_of(refusal)).encode()
    assert episode.failure is None
    episode.finish()
    if episode.trajectory.turns:
        for how in ("merged", "step_wise"):
            audit(
                emit(episode.trajectory, how),
                [episode.trajectory],
                image_token_id=renderer().image_token_id,
                banned_ids=[],
            )


def check(response: ChatResponse, parsed: ParsedRequest) -> None:
    if not response.tool_calls:
        assert not any(stop in response.content for stop in parsed.chat.stop)
    elif response.content:
        assert response.content.strip()
    assert parsed.chat.reads_calls or not response.tool_calls
    assert len(response.token_ids) == len(response.logprobs) <= (parsed.chat.max_tokens or 1000)


def with_tools(rng: random.Random) -> bodies.Body:
    is_tool = {"messages": [{"role": "user", "content": "hi"}]}
    return is_tool | {"tools": [bodies.tool(rng, is_openai=True) for _ in range(rng.randint(1, 3))]}


def with_stops(rng: random.Random) -> bodies.Body:
    body = {"messages": [{"role": "user", "content": "hi"}], "stop": bodies.stops(rng)}
    return body | ({"tools": bodies.tools(rng, is_openai=True)} if rng.random() < 0.5 else {})


CASES = [
    ("openai", bodies.openai_body, OPENAI),
    ("anthropic", bodies.anthropic_body, ANTHROPIC),
    ("responses", bodies.responses_body, RESPONSES),
    ("tools", with_tools, OPENAI),
    ("stops", with_stops, OPENAI),
]


@pytest.mark.parametrize(("area", "make", "api"), CASES, ids=[name for name, _, _ in CASES])
def test_a_hostile_body_is_answered_or_refused(area, make, api, hostile):
    seen = Counter[str]()
    for rng in hostile(f"gateway {area}"):
        body = make(rng)
        with harmless(body):
            asyncio.run(one(rng, body, api, seen))
    assert seen["answered"] and seen["refused"], seen


@pytest.mark.slow
def test_hostile_bodies_over_http(hostile):
    quiet = agent_episode(lambda request, turn: "fine", max_turns=10**6)
    for number, rng in enumerate(hostile("gateway http")):
        with serving(episode_of(rng), quiet) as served:
            make, paths = rng.choice(OVER_HTTP)
            body = make(rng)
            content = bodies.sent(rng, body)
            if rng.random() < 0.3:
                place = rng.randrange(len(content))
                content = content[:place] + rng.randbytes(rng.randint(0, 3)) + content[place + rng.randint(0, 3) :]
            with harmless(body, ("127.0.0.1",)):
                response = served.post(rng.choice(paths), content)
            assert response.status_code in (200, 400), (number, response.text)
            assert served.post(client=served.clients[1]).status_code == 200
        if number >= 200:  # each has a server of its own
            break
