"""The agents of recipes/agents on responses that are wrong: they get no reward, and never fail, which would play them again."""

import asyncio
import inspect
import json
from pathlib import Path

import pytest
from testing.client_episodes import need, play_client
from testing.episodes import renderer

from vlmrl.config.code import load_object
from vlmrl.types import Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "zoom_openai": "openai",
    "zoom_openai_agents": "agents",
    "zoom_smolagents": "smolagents",
    "zoom_langgraph": "langgraph",
}


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


MISTAKES = {
    "noise": ["?", "!", "."],
    "no such tool": [call("look", quarter="top left"), "?", "?"],
    "no such quarter": [call("zoom", quarter="middle"), "?", "?"],
    "no such argument": [call("zoom", part="top left"), "?", "?"],
    "no arguments": [call("zoom"), "?", "?"],
    "of another type": [call("zoom", quarter=[1]), "?", "?"],
    "two calls": [call("zoom", quarter="top left") + call("zoom", quarter="bottom left"), "?", "?"],
    "no end": [call("zoom", quarter="top left")] * 4,
}


def shapes_task() -> Task:
    row = load_object(f"{ROOT}/datasets/shapes.py:make_task")(0, 0)
    parts = [
        {"type": "image", "image": row["images"][0]},
        {"type": "text", "text": "What color is the shape top left?"},
    ]
    return Task("t", [{"role": "user", "content": parts}], row["images"], row["answer"], {"quarter": row["quarter"]})


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("recipe", PACKAGES)
def test_a_wrong_response_is_no_failure(recipe, mistake):
    need(PACKAGES[recipe])
    play = load_object(f"{ROOT}/recipes/agents/{recipe}.py:play")
    limits = load_object(f"{ROOT}/recipes/agents/{recipe}.py:config")().rollout
    refused = []

    def agent(client):
        """What the agent returns; at a budget, which refuses a request, it may raise instead."""
        try:
            result = play(shapes_task(), client)
            return asyncio.run(result) if inspect.isawaitable(result) else result
        except Exception as error:
            if "max_turns" not in str(error) or limits.truncated_reward is None:
                raise
            refused.append(error)
            return limits.truncated_reward

    sizes = {name: getattr(limits, name) for name in ("max_turns", "max_tokens", "max_response_tokens")}
    played = play_client(agent, MISTAKES[mistake], renderer(), **sizes)
    assert played.result == 0.0
    assert not refused or len(played.trajectory.turns) == limits.max_turns
