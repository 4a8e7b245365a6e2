"""A prompt's length before it is played is its length when it is played."""

from __future__ import annotations

from typing import Any

import pytest
from testing.episodes import a_task, image, new_store, play, renderer

from vlmrl import Env, obs
from vlmrl.data.lengths import prompt_tokens
from vlmrl.types import Task

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Judge(Env):
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(), True, {"reward": 1.0}


class Tooled(Judge):
    tools = [TOOL]  # noqa: RUF012


@pytest.mark.parametrize("env", [Judge, Tooled])
@pytest.mark.parametrize(
    "task",
    [
        a_task("What is 2+2?"),
        a_task("Which?", [image("red", (100, 64)), image("blue", (300, 40))]),
        a_task("The text <|image_pad|> is no image.", [image()]),
    ],
)
def test_a_prompt_is_as_long_as_when_it_is_played(env: type[Env], task: Task):
    count = prompt_tokens(renderer(), new_store(), lambda task: env.tools)
    assert count(task) == len(play(env, ["a"], task).turns[0].prompt_ids)


def test_images_count_with_every_token_and_none_is_processed():
    store = new_store()
    count = prompt_tokens(renderer(), store, lambda task: [])
    assert count(a_task("Which?", [image(size=(320, 64))])) - count(a_task("Which?", [image(size=(32, 64))])) == 18
    assert store.processed == 0
