"""Zoom: the image is shown too coarse to answer from; a tool call brings a closer crop; then the agent answers.

The agent calls ``<tool_call>{"name": "zoom", "arguments": {"bbox": [0, 0, 500, 500]}}</tool_call>`` with the corners left, top,
right, bottom in thousandths of the image, as often as it has turns. A reply with ``<answer>...</answer>`` ends the episode.
"""

import json
import re

from PIL import Image

from vlmrl import Env, Task, load_image, obs

ZOOM = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Look closer at a part of the image.",
        "parameters": {
            "type": "object",
            "properties": {
                "bbox": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "Left, top, right and bottom of the part, in thousandths of the image.",
                }
            },
            "required": ["bbox"],
        },
    },
}


class ZoomEnv(Env):
    """Task: a question about its one image, and the answer as a word.

    ``coarse`` and ``crop`` are the longest sides, in pixels, of the first image and of each crop. ``tools_in_prompt=False`` leaves
    the schema out of the prompt, for a model that is too small to read it.
    """

    def __init__(self, task: Task, coarse: int = 64, crop: int = 256, tools_in_prompt: bool = True) -> None:
        super().__init__(task)
        self.image = load_image(task.images[0])
        self.coarse, self.crop = coarse, crop
        self.tools = [ZOOM] if tools_in_prompt else []

    def reset(self):
        coarse = {"type": "image", "image": fit(self.image, self.coarse)}
        messages = []
        for message in self.task.prompt:
            content = message["content"]
            if not isinstance(content, str):
                content = [coarse if part["type"] == "image" else part for part in content]
            messages.append({**message, "content": content})
        return messages

    def step(self, response_text):
        if answer := re.findall(r"<answer>(.*?)</answer>", response_text, re.DOTALL):
            right = answer[-1].strip().lower() == str(self.task.answer).strip().lower()
            return obs(), True, {"reward": float(right), "answered": 1}
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", response_text, re.DOTALL)
        if not calls:
            return obs("Call zoom, or give your answer as <answer>...</answer>."), False, {"zooms": 0}
        try:
            box = read_box(calls[-1])
        except ValueError as error:
            return obs(f"{error} Try again."), False, {"zooms": 0}
        width, height = self.image.size
        left, top = box[0] * width // 1000, box[1] * height // 1000
        right, bottom = max(left + 1, box[2] * width // 1000), max(top + 1, box[3] * height // 1000)
        closer = self.image.crop((left, top, right, bottom))
        return obs("Closer:", images=[fit(closer, self.crop)]), False, {"zooms": 1}

    def finish(self, ending):
        return None if ending == "env_done" else 0.0  # an episode without an answer is a wrong one


def read_box(call: str) -> list[int]:
    """The bbox of a zoom call; ValueError says to the model what is wrong with it."""
    try:
        parsed = json.loads(call)
        name, arguments = parsed["name"], parsed["arguments"]
        box = [int(corner) for corner in arguments["bbox"]]
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError('A call is {"name": "zoom", "arguments": {"bbox": [left, top, right, bottom]}}.') from None
    if name != "zoom":
        raise ValueError(f"There is no tool {name!r}; the only one is zoom.")
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1000 and 0 <= box[1] < box[3] <= 1000):
        raise ValueError(f"bbox must be left < right and top < bottom within 0 and 1000, but it is {box}.")
    return box


def fit(image: Image.Image, side: int) -> Image.Image:
    """The image scaled so that its longest side has ``side`` pixels."""
    scale = side / max(image.size)
    return image.resize(
        [max(1, round(length * scale)) for length in image.size],
        Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC,
    )
