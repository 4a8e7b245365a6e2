"""Random trees of requests: what is trained is what was sampled, after what a full render of the received messages shows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing.agent_episodes import LIMITS, new_trajectory
from testing.episodes import new_store, renderer
from testing.fakes import Router
from testing.gateway import PATIENCE, Served, serving
from testing.request_trees import KINDS, Complete, RandomAgent, Responses, Step, experts_of
from testing.templates import STABLE, real_renderer
from torch import nn

from vlmrl.config import Rollout
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.multimodal.openai_messages import openai_messages
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.rollout.message_images import load_images
from vlmrl.samples import audit, emit
from vlmrl.types import MediaItem, Trajectory

ROUTING = ExpertRouters(nn.ModuleList([Router()]), "Router")  # one layer, two of three experts
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 19)), min_size=1, max_size=12)


def new_episode(responses: Responses, renderer: Renderer, with_images: bool = True) -> KeepsResponses:
    config = Rollout(**(LIMITS | {"max_turns": 1000, "max_tokens": 100_000}))  # type: ignore[arg-type]
    store = new_store() if with_images else None
    episode = KeepsResponses(new_trajectory(), ScriptedEngine(responses, renderer), renderer, store, config, 0)
    episode.responses = {}
    return episode


def played(steps: list[Step], renderer: Renderer, with_images: bool = True, has_experts: bool = False) -> RandomAgent:
    """An agent that has played the steps and finished its episode, in which the response of each request was checked."""

    async def play() -> RandomAgent:
        responses = Responses(renderer, has_experts)
        agent = RandomAgent(new_episode(responses, renderer, with_images), responses, with_images)
        await agent.play(steps)
        agent.episode.finish()
        return agent

    return asyncio.run(asyncio.wait_for(play(), 600))


def over_http(episode: KeepsResponses, served: Served, client: httpx.AsyncClient) -> Complete:
    """Sends a request to the server as OpenAI's clients do."""

    async def complete(request: ChatRequest) -> ChatResponse:
        messages = openai_messages(request.messages)
        for message in messages:
            if "tool_calls" in message:
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ]
        body = {"model": "m", "messages": messages} | ({"tools": request.tools} if request.tools else {})
        headers = {"authorization": f"Bearer {served.client.api_key}"}
        response = await client.post(f"{served.client.url}/v1/chat/completions", json=body, headers=headers)
        answer = response.json()
        if response.status_code != 200:
            raise ChatError(response.status_code, answer["error"]["code"], answer["error"]["message"])
        response, message = episode.responses[answer["id"]], answer["choices"][0]["message"]
        assert (message["content"] or "") == response.content
        assert [call["id"] for call in message.get("tool_calls") or ()] == [call.id for call in response.tool_calls]
        return response

    return complete


class KeepsResponses(AgentEpisode):
    """Keeps its responses by their ids."""

    responses: dict[str, ChatResponse]

    async def complete(self, request: ChatRequest) -> ChatResponse:
        response = await super().complete(request)
        self.responses[response.id] = response
        return response


def check(agent: RandomAgent) -> None:
    """Every sampled token is in one turn, or was lost; each prompt is a full render; rows pass the audit."""
    trajectory, delivered = agent.episode.trajectory, [sent for sent in agent.sent if not sent.lost]
    metrics = trajectory.metrics
    assert metrics["requests_cancelled"] == agent.cancelled
    assert metrics["responses_undelivered"] == len(agent.sent) - len(delivered)
    by_response = {id(sent.response.token_ids): sent for sent in delivered}
    assert len(agent.responses.sampled) == len(agent.sent)
    assert Counter(id(turn.response_ids) for turn in trajectory.turns) == Counter(list(by_response))
    if not delivered:
        return
    order = [by_response[id(turn.response_ids)] for turn in trajectory.turns]
    for sent, turn, (ids, media) in zip(order, trajectory.turns, trajectory.prompts(), strict=True):
        above = None if turn.received.continues is None else order[turn.received.continues]
        assert above is sent.above
        assert_full_render(agent.episode, sent.conversation, sent.tools, ids, media)
    for how in ("merged", "step_wise"):
        rows = emit(trajectory, how)
        image_token_id = agent.episode.renderer.image_token_id if agent.with_images else None
        report = audit(rows, [trajectory], image_token_id=image_token_id)
        assert report.trained_tokens == sum(len(sent.response.token_ids) for sent in delivered)
        assert report.left_out == {}
    assert len(emit(trajectory, "merged")) == metrics["branches"]


def assert_full_render(
    episode: AgentEpisode, conversation: list, tools: list, ids: list[int], media: list[MediaItem]
) -> None:
    """The prompt has the text and the images of the whole conversation as the chat template writes it."""
    renderer, store = episode.renderer, episode.store
    messages = asyncio.run(load_images(conversation, store, 60.0))
    rendered = renderer.prompt(renderer.adapt_tool_messages(messages), tools)
    assert [item.id for item in media] == [item.id for item in rendered.images]
    assert renderer.decode(ids) == renderer.decode(expand(rendered.token_ids, renderer.image_token_id, rendered.images))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_random_requests(steps: list[Step]):
    check(played(steps, renderer()))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_the_experts_of_random_requests_are_those_of_each_context(steps: list[Step]):
    trajectory = played(steps, renderer(), has_experts=True).episode.trajectory
    image_token_id = renderer().image_token_id
    continued = {turn.parent for turn in trajectory.turns if turn.kept == trajectory.turns[turn.parent or 0].length}
    for number in range(len(trajectory.turns)):
        context = trajectory.context(number)
        wanted = experts_of(context.token_ids, context.media, image_token_id)
        if context.expert_routing[-1] is None:
            assert number not in continued
            wanted[-1:] = [None]  # it was not run
        assert context.expert_routing == wanted
    for how in ("merged", "step_wise") if trajectory.turns else ():
        audit(emit(trajectory, how), [trajectory], image_token_id=image_token_id, routing=ROUTING)


@pytest.mark.parametrize("template", STABLE)
def test_random_requests_with_real_templates(shared: Path, template: str):
    tokenizer = "qwen2.5-vl" if template == "qwen2_5_vl" else "qwen3-vl"

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def play(steps: list[Step]) -> None:
        check(played(steps, real_renderer(shared, tokenizer, template), with_images=template.endswith("vl")))

    play()


@pytest.mark.slow
def test_random_requests_over_http():
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def play(steps: list[Step]) -> None:
        responses = Responses(renderer())
        episode = new_episode(responses, renderer())

        async def act(served: Served) -> RandomAgent:
            async with httpx.AsyncClient(timeout=PATIENCE) as client:
                agent = RandomAgent(episode, responses, complete=over_http(episode, served, client))
                await agent.play(steps)
            episode.finish()
            return agent

        with serving(episode) as served:
            agent = served.run_loop.wait(act(served), PATIENCE)
        check(agent)

    play()


@pytest.mark.parametrize("moment", range(6))
def test_a_request_that_is_cancelled_while_the_episode_ends_is_counted(moment: int):
    """Its task and its caller end at different turns of the loop."""

    async def act() -> Trajectory:
        responses = Responses(renderer())
        episode = new_episode(responses, renderer())
        responses.hangs = True
        caller = asyncio.create_task(episode.complete(ChatRequest([{"role": "user", "content": "Wait."}], [])))
        await responses.reached.wait()
        caller.cancel()
        for _ in range(moment):
            await asyncio.sleep(0)
        episode.finish()
        await asyncio.wait([caller])
        return episode.trajectory

    assert asyncio.run(act()).metrics["requests_cancelled"] == 1
