"""The generators of docs/samples.md play an episode as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmrl.model import tiny
from vlmrl.multimodal.renderer import Renderer

PAGE = (Path(__file__).parents[2] / "docs" / "samples.md").read_text()


class Client:
    """Answers each call with the same ids."""

    def __init__(self, response):
        self.response, self.prompts = response, []

    async def generate(self, token_ids, images):
        self.prompts.append(token_ids)
        return SimpleNamespace(token_ids=self.response)

    def trajectory(self, reward):
        return reward


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_the_second_question_follows_a_closed_response(end):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def twice" in block)
    names = {}
    exec(code, names)
    words = tiny.tokenizer()
    renderer = Renderer(words, image_token="<|image_pad|>")
    client = Client(words.encode(f"red{end}"))
    task = SimpleNamespace(**names["tasks"](0, 0) | {"prompt": [{"role": "user", "content": "Which color?"}]})
    assert asyncio.run(names["twice"](client, renderer, task)) == 1.0
    first, second = map(renderer.decode, client.prompts)
    assert second.startswith(f"{first}red<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>")
