"""Agents' requests without a server: an episode whose responses are written, and conversations to send to it."""

from __future__ import annotations

from typing import Any

from testing.episodes import Script, a_task, new_store, renderer, script
from vlmrl.config import Rollout
from vlmrl.gateway.chat import ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.request_tree import message_of_response
from vlmrl.types import Message, Trajectory

LIMITS = {"max_turns": 50, "max_tokens": 4000, "max_response_tokens": 100, "env_timeout": 20.0, "samples": "merged"}
ZOOM = {
    "type": "function",
    "function": {"name": "zoom", "description": "Zoom in.", "parameters": {"type": "object", "properties": {"k": {}}}},
}


def says(role: str, text: str | None, *images: Any, **fields: Any) -> Message:
    """A message: ``says("user", "What is it?", red_image)``."""
    if not images:
        return {"role": role, "content": text, **fields}
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}], **fields}


def zoom_call(k: Any) -> str:
    return f'<tool_call>\n{{"name": "zoom", "arguments": {{"k": {k}}}}}\n</tool_call>'


def new_trajectory(id: str = "g/00") -> Trajectory:
    return Trajectory(id, "g", a_task(), ending="env_done", final_reward=1.0)


def agent_episode(responses: Script | Any, **rollout: Any) -> AgentEpisode:
    """An episode against an engine, or one that says ``responses`` one after another, or what the function says."""
    if hasattr(responses, "generate"):
        engine = responses
    else:
        left = iter(responses) if not callable(responses) else None
        engine = script(responses if left is None else lambda request, turn: next(left))
    return AgentEpisode(new_trajectory(), engine, renderer(), new_store(), Rollout(**(LIMITS | rollout)), seed=0)


class Agent:
    """A conversation with an episode: ``ask`` sends all of it and a new message, and appends the response."""

    def __init__(self, episode: AgentEpisode, *messages: Message, tools: list[dict[str, Any]] | None = None) -> None:
        self.episode = episode
        self.messages = list(messages)
        self.tools = tools or []
        self.responses: list[ChatResponse] = []

    def fork(self) -> Agent:
        """Another one with the same conversation so far."""
        return Agent(self.episode, *self.messages, tools=self.tools)

    async def ask(self, *messages: Message, **fields: Any) -> ChatResponse:
        self.messages += messages
        response = await self.episode.complete(ChatRequest(list(self.messages), self.tools, **fields))
        self.messages.append(message_of_response(response))
        self.responses.append(response)
        return response
