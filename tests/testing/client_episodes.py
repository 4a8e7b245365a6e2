"""Episodes that real clients play through the real HTTP server, on scripted responses, and what is checked of each."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from testing.episodes import new_store
from vlmrl.config import Gateway, Rollout
from vlmrl.engine.base import Engine
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.chat import ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.gateway_server import GatewayServer
from vlmrl.multimodal.placeholders import expand
from vlmrl.multimodal.renderer import Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.samples import audit, emit
from vlmrl.types import Message, Sample, Task, Trajectory


def need(package: str) -> Any:
    """Import a client's package, or skip the test; fail it with VLMRL_REQUIRE_CLIENTS, which CI sets."""
    if os.environ.get("VLMRL_REQUIRE_CLIENTS"):
        return __import__(package)
    return pytest.importorskip(package, reason=f"no {package}: pip install 'vlmrl[clients]'")


class RecordedEpisode(AgentEpisode):
    """Keeps each request with its response."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchanges: list[tuple[ChatRequest, ChatResponse]] = []

    async def complete(self, request: ChatRequest) -> ChatResponse:
        response = await super().complete(request)
        self.exchanges.append((request, response))
        return response


@dataclass(frozen=True)
class Played:
    """A finished episode: what the agent returned, the requests as the gateway read them, and the trajectory's audited rows."""

    result: Any
    trajectory: Trajectory
    exchanges: list[tuple[ChatRequest, ChatResponse]]
    rows: list[Sample]

    @property
    def continued(self) -> list[bool]:
        """For each turn, whether its request continued an earlier one."""
        return [turn.received is not None and turn.received.continues is not None for turn in self.trajectory.turns]


def play_client(
    agent: Callable[[AgentClient], Any],
    responses: Sequence[str] | Engine,
    renderer: Renderer,
    *,
    store: MediaStore | None = None,
    **rollout: Any,
) -> Played:
    """One episode of ``agent``, a function of its client, async or not. Its rows pass the audit."""
    engine: Any = responses if hasattr(responses, "generate") else scripted(responses, renderer)  # type: ignore[arg-type]
    limits: dict[str, Any] = {
        "max_turns": 8,
        "max_tokens": 8192,
        "max_response_tokens": 256,
        "samples": "merged",
    } | rollout
    trajectory = Trajectory("step/0/00", "step/0", Task("t", []))
    episode = RecordedEpisode(trajectory, engine, renderer, store or new_store(), Rollout(**limits), 0)
    result = asyncio.run(_play(agent, episode))
    assert episode.failure is None, episode.failure
    trajectory.ending, trajectory.final_reward = "env_done", 1.0
    for form in ("step_wise", "merged"):
        rows = emit(trajectory, form)
        audit(rows, [trajectory], image_token_id=renderer.image_token_id)
    return Played(result, trajectory, episode.exchanges, rows)


async def _play(agent: Callable[[AgentClient], Any], episode: AgentEpisode) -> Any:
    server = GatewayServer(Gateway())
    client = await server.open(episode)
    try:
        if inspect.iscoroutinefunction(agent):
            return await agent(client)
        return await asyncio.to_thread(agent, client)
    finally:
        server.close_episode(client)
        episode.finish()
        server.close()


def scripted(responses: Sequence[str], renderer: Renderer) -> ScriptedEngine:
    """An engine that says ``responses`` one after another, in whatever branches."""
    following = iter(responses)
    return ScriptedEngine(lambda request, turn: next(following), renderer)


def prompts_are_full_renders(played: Played, renderer: Renderer, store: MediaStore) -> bool:
    """Whether each turn's prompt is what the template makes of its whole request, images expanded.

    The responses that a client repeats are rendered as their sampled texts, whatever the client made of them.
    """
    responses = [response for _, response in played.exchanges]
    by_response = {tuple(response.token_ids): request for request, response in played.exchanges}
    for turn, (prompt, media) in zip(played.trajectory.turns, played.trajectory.prompts(), strict=True):
        request = by_response[tuple(turn.response_ids)]
        messages = [_as_sampled(message, responses, renderer) for message in request.messages]
        rendered = renderer.prompt(renderer.adapt_tool_messages(messages), request.tools)
        items = asyncio.run(_load(store, rendered.images))
        if prompt != expand(rendered.token_ids, renderer.image_token_id, items):
            return False
        if [item.id for item in media] != [item.id for item in items]:
            return False
    return True


def _as_sampled(message: Message, responses: Sequence[ChatResponse], renderer: Renderer) -> Message:
    """A response that the client repeats, found by its calls' ids or its text, as its sampled text. Other messages stay."""
    if message["role"] != "assistant":
        return message
    ids = [call["id"] for call in message.get("tool_calls", ())]
    for response in responses:
        known = [call.id for call in response.tool_calls]
        if known == ids and (ids or response.content == message["content"]):
            return {"role": "assistant", "content": renderer.text(response.token_ids)}
    return message


async def _load(store: MediaStore, images: Sequence[Any]) -> list[Any]:
    return [await store.get(image, 60.0) for image in images]
