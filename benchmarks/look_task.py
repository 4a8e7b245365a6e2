"""The task of `vs_trl.py`: an agent looks at image after image by calling a tool. Once for vlmrl, once for TRL."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from PIL import Image
from transformers.utils import get_json_schema

from vlmrl import Env, Task, obs
from vlmrl.env.tool_calls import read_tool_calls

CALL = '<tool_call>\n{"name": "look", "arguments": {"page": PAGE}}\n</tool_call>'
QUESTION = "Look at all the images, one by one."
PAGES = "2346789"  # the tiny tokenizer has two tokens for each of them


def image(seed: int, number: int, side: int) -> Image.Image:
    """Equal for equal seeds, and drawn again at each call, as a crop would be."""
    return Image.fromarray(np.random.default_rng([seed, number]).integers(0, 256, (side, side, 3), dtype=np.uint8))


def look(page: int) -> list:
    """Look at the next image.

    Args:
        page: Any number.
    """


def make_task(index: int, seed: int, turns: int, side: int) -> dict[str, Any]:
    return {"prompt": f"<image>{QUESTION}", "images": [image(index, 0, side)], "turns": turns}


class LookEnv(Env):
    """vlmrl's side: a tool message with an image after each call, and TRL's answers to other responses.

    With ``own_images`` each member of a group sees images of its own, except for the prompt's.
    In TRL, a malformed call makes the whole response plain text, which ends the episode; a call that fails is answered by its error.
    """

    tools = [get_json_schema(look)]  # noqa: RUF012

    def __init__(self, task: Task, turns: int, side: int, own_images: bool = False) -> None:
        super().__init__(task)
        self.turns, self.side, self.own_images, self.number = turns, side, own_images, 0

    def reset(self):
        if self.own_images:
            self.seed = random.getrandbits(32)

    def step(self, response_text):
        calls = read_tool_calls(response_text)
        if not calls or any(call.problem for call in calls):
            return obs(), True, {}
        texts, images = [], []
        for call in calls:
            if call.name != "look":
                texts.append(str({"error": f"Tool {call.name} not found."}))
            elif set(call.arguments) != {"page"}:
                texts.append(str({"error": "look() takes the argument 'page'"}))
            else:
                self.number += 1
                images.append(image(self.seed, self.number, self.side))
                texts.append(caption(self.number, self.turns))
        return obs("\n".join(texts), images=images), False, {}

    def format_observation(self, observation):
        return {**super().format_observation(observation), "role": "tool"}

    def finish(self, ending):
        return float(np.random.random())


def caption(number: int, turns: int) -> str:
    return "The last one." if number == turns - 1 else "There is one more."


def demonstrate(task: Task, turn: int) -> str:
    digit = random.Random(f"{task.id}/{turn}").choice(PAGES)
    return CALL.replace("PAGE", digit) if turn < task.data["turns"] - 1 else "Done."


class LookTRL:
    """TRL's side: the public methods are the tools."""

    def __init__(self, turns: int, side: int, own_images: bool) -> None:
        self._turns, self._side, self._own_images = turns, side, own_images

    def reset(self, seed: int, **columns: Any) -> None:
        self._seed, self._number = random.getrandbits(32) if self._own_images else seed, 0

    def look(self, page: int) -> list:
        """Look at the next image.

        Args:
            page: Any number.
        """
        self._number += 1
        shown = image(self._seed, self._number, self._side)
        return [{"type": "image", "image": shown}, {"type": "text", "text": caption(self._number, self._turns)}]

    def get_reward(self) -> float:
        return float(np.random.random())
