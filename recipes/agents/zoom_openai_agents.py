"""The quickstart's task for an agent of the OpenAI Agents SDK, whose `zoom` tool ends a first run; the second one sees the crop.

The SDK leaves images out of tool results in Chat Completions requests, so the crop is sent as a user message. The second run
continues the first one's messages: the sampled tokens are kept, and the episode is one row of training.

    pip install 'vlmrl[agents]' openai-agents
    python recipes/agents/zoom_openai_agents.py
"""

import json

from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from PIL import Image

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart, data_uri, load_image

QUARTERS = ["top left", "top right", "bottom left", "bottom right"]
set_tracing_disabled(True)


async def play(task, client):
    """The agent: it returns the reward, 1 for the right color."""
    image = load_image(task.images[0])
    shown = []

    @function_tool
    def zoom(quarter: str) -> str:
        """Look closer."""
        shown.append(crop(image, quarter))
        return "Closer:"

    model = OpenAIChatCompletionsModel(client.model, client.async_openai())
    agent = Agent("zoom", tools=[zoom], model=model, tool_use_behavior="stop_on_first_tool")
    question = task.prompt[0]["content"][-1]["text"]
    try:
        result = await Runner.run(agent, [look(image.resize((32, 32), Image.Resampling.BOX), question)])
        if shown:
            result = await Runner.run(agent, [*result.to_input_list(), look(shown[0], "Answer")])
    except ModelBehaviorError:  # such as a call of a tool that does not exist: a wrong response, not a failed agent
        return 0.0
    return float(str(result.final_output).strip() == task.answer)


def look(image, text):
    """A user message with an image."""
    shown = {"type": "input_image", "image_url": data_uri(image), "detail": "auto"}
    return {"role": "user", "content": [shown, {"type": "input_text", "text": text}]}


def crop(image, quarter):
    """A quarter of the image, at 32 pixels. The model reads the text of the ValueError."""
    half, number = image.width // 2, QUARTERS.index(quarter)
    left, top = half * (number % 2), half * (number // 2)
    return image.crop((left, top, left + half, top + half)).resize((32, 32), Image.Resampling.BOX)


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate at each request: the right zoom, then a guess."""
    if turn:
        return ["red", "green", "blue", "yellow"][task.seed % 4]
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
        warm_start=WarmStart(demonstrate=demonstrate, steps=200, trajectories_per_step=16, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
