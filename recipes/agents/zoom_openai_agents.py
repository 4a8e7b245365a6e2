"""The quickstart's task for an agent of the OpenAI Agents SDK, whose `zoom` tool returns an image.

The SDK uses OpenAI's Responses API, in which a tool's result may hold images; its chat completions leave them out.

    pip install 'vlmrl[agents]' openai-agents
    python recipes/agents/zoom_openai_agents.py
"""

import json
import random
from typing import Literal, get_args

from agents import (
    Agent,
    ModelBehaviorError,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from PIL import Image

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart, data_uri, load_image

COLORS = ["red", "green", "blue", "yellow"]
Quarter = Literal["top left", "top right", "bottom left", "bottom right"]
set_tracing_disabled(True)


async def play(task, client):
    """The agent: it returns the reward, 1 for the right color."""
    image = load_image(task.images[0])

    # A call with a wrong quarter raises a ModelBehaviorError.
    @function_tool(failure_error_function=None)
    def zoom(quarter: Quarter) -> ToolOutputImage:
        """Look closer."""
        return ToolOutputImage(image_url=data_uri(crop(image, quarter)))

    agent = Agent("zoom", tools=[zoom], model=OpenAIResponsesModel(client.model, client.async_openai()))
    small = {
        "type": "input_image",
        "image_url": data_uri(image.resize((32, 32), Image.Resampling.BOX)),
        "detail": "auto",
    }
    question = {"type": "input_text", "text": task.prompt[0]["content"][-1]["text"]}
    try:
        result = await Runner.run(agent, [{"role": "user", "content": [small, question]}])
    except ModelBehaviorError:  # a wrong response, not a failed agent
        return 0.0
    return float(str(result.final_output).strip() == task.answer)


def crop(image, quarter):
    """A quarter of the image, at 32 pixels."""
    half, number = image.width // 2, get_args(Quarter).index(quarter)
    left, top = half * (number % 2), half * (number // 2)
    return image.crop((left, top, left + half, top + half)).resize((32, 32), Image.Resampling.BOX)


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate at each request: the right zoom, then a color that is right 42 times in a hundred."""
    if turn:
        luck = random.Random(task.seed)
        return task.answer if luck.random() < 0.42 else luck.choice([color for color in COLORS if color != task.answer])
    call = {"name": "zoom", "arguments": {"quarter": task.data["quarter"]}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def config() -> Config:
    shapes = "../../datasets/shapes.py:make_task"
    return Config(
        name="zoom-openai-agents",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=4096),
        agent=play,
        rollout=Rollout(
            group_size=8, max_turns=2, max_tokens=1024, max_response_tokens=64, samples="merged", truncated_reward=0.0
        ),
        warm_start=WarmStart(demonstrate=demonstrate, steps=400, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
