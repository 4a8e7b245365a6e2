"""Zoom: the agent sees a coarse image, requests closer crops with a tool, and then answers.

A call is ``<tool_call>{"name": "zoom", "arguments": {"bbox": [0, 0, 500, 500]}}</tool_call>``: left, top, right and bottom in
thousandths of the image. The agent may call once per turn. A response with ``<answer>...</answer>`` ends the episode.
"""

from PIL import Image

from vlmrl import Task, ToolCall, ToolEnv, load_image, obs, read_tags, read_tool_calls

MAX_RATIO = 100


class ZoomEnv(ToolEnv):
    """Task: a question about its one image, and the answer as a word.

    ``coarse`` and ``crop`` are the longest sides, in pixels, of the first image and of each crop. ``tools_in_prompt=False`` leaves
    the schema out of the prompt, for a model that is too small to read it.
    """

    tools = []  # noqa: RUF012  the option tools_in_prompt decides
    unfinished_reward = 0.0  # an episode without an answer is a wrong one

    def __init__(self, task: Task, coarse: int = 64, crop: int = 256, tools_in_prompt: bool = True) -> None:
        super().__init__(task)
        self.image = load_image(task.images[0])
        self.coarse, self.crop = coarse, crop
        self.tools = self.schemas if tools_in_prompt else []

    def reset(self):
        coarse = {"type": "image", "image": fit(self.image, self.coarse)}
        messages = []
        for message in self.task.prompt:
            content = message["content"]
            if not isinstance(content, str):
                content = [coarse if part["type"] == "image" else part for part in content]
            messages.append({**message, "content": content})
        return messages

    def zoom(self, bbox: list[int]) -> dict:
        """Look closer at a part of the image.

        Args:
            bbox: Left, top, right and bottom of the part, in thousandths of the image.
        """
        width, height = self.image.size
        left, top = bbox[0] * width // 1000, bbox[1] * height // 1000
        right, bottom = max(left + 1, bbox[2] * width // 1000), max(top + 1, bbox[3] * height // 1000)
        closer = self.image.crop((left, top, right, bottom))
        if max(closer.size) > MAX_RATIO * min(closer.size):  # the model's processor would refuse it
            size = f"{closer.width}x{closer.height}"
            raise ValueError(f"bbox is too thin: it has {size} pixels; the limit is {MAX_RATIO}:1. Try again.")
        return obs("Closer:", images=[fit(closer, self.crop)])

    functions = (zoom,)

    def judge(self, response):
        right = read_tags(response, "answer")[-1].strip().lower() == str(self.task.answer).strip().lower()
        return {"reward": float(right), "answered": 1}

    def read_calls(self, response):
        """No call if the response has an answer, otherwise its last whole call. A response with neither gets a hint."""
        if read_tags(response, "answer"):
            return []
        whole, end, _ = response.rpartition("</tool_call>")
        calls = read_tool_calls(whole + end, self.tools, self.tool_format)
        if not calls:
            return [ToolCall(problem="Call zoom, or give your answer as <answer>...</answer>.")]
        try:
            return [ToolCall("zoom", {"bbox": read_box(calls[-1])})]
        except ValueError as error:
            return [ToolCall(problem=f"{error} Try again.")]

    def show_results(self, results):
        (result,) = results
        return (obs(result.problem) if result.problem else result.value), {"zooms": int(not result.problem)}


def read_box(call: ToolCall) -> list[int]:
    """The bbox of a zoom call. The text of a ValueError explains to the model what is wrong with it."""
    try:
        box = [int(corner) for corner in call.arguments["bbox"]]
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError('A call is {"name": "zoom", "arguments": {"bbox": [left, top, right, bottom]}}.') from None
    if call.name != "zoom":
        raise ValueError(f"There is no tool {call.name!r}; the only one is zoom.")
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
