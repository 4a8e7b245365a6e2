"""The quickstart's task for a smolagents agent with a tool: it calls `zoom`, a callback shows the crop, and `final_answer` ends it.

smolagents writes its own calls into the history as text ("Calling tools: ..."), so each request is a new branch of the episode: the
model is trained on every response, after the prompt that it had. What the branches share is computed once.

    pip install 'vlmrl[agents]' smolagents
    python recipes/agents/zoom_smolagents.py
"""

import json
import random

from PIL import Image, ImageOps
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart, load_image

COLORS = ["red", "green", "blue", "yellow"]
QUARTERS = ["top left", "top right", "bottom left", "bottom right"]


@tool
def zoom(quarter: str) -> str:
    """Look closer.

    Args:
        quarter: Such as top left.
    """
    if quarter not in QUARTERS:
        raise ValueError(f"quarter must be one of {', '.join(QUARTERS)}.")
    return "Closer:"


def play(task, client):
    """The agent: it returns the reward, 1 for the right color."""
    image = load_image(task.images[0])

    def show(step, agent):
        """A step's crops are the images of its observation."""
        zooms = [call for call in step.tool_calls or [] if call.name == "zoom"]
        step.observations_images = [crop(image, call.arguments["quarter"]) for call in zooms]

    model = OpenAIModel(client.model, api_base=client.base_url, api_key=client.api_key)
    agent = ToolCallingAgent([zoom], model, max_steps=2, step_callbacks=[show], verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "Call zoom, then final_answer."
    small = ImageOps.contain(image, (32, 32), Image.Resampling.BOX)
    answer = agent.run(task.prompt[0]["content"][-1]["text"], images=[small])
    return float(str(answer).strip() == task.answer)


def crop(image, quarter):
    """A quarter of the image, at 32 pixels."""
    half, number = image.width // 2, QUARTERS.index(quarter)
    left, top = half * (number % 2), half * (number // 2)
    return image.crop((left, top, left + half, top + half)).resize((32, 32), Image.Resampling.BOX)


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate at each request: the right zoom, then a color that is right 42 times in a hundred."""
    luck = random.Random(task.seed)
    wrong = [color for color in COLORS if color != task.answer]
    color = task.answer if luck.random() < 0.42 else luck.choice(wrong)
    name, arguments = [("zoom", {"quarter": task.data["quarter"]}), ("final_answer", {"answer": color})][min(turn, 1)]
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def config() -> Config:
    shapes = "../../datasets/shapes.py:make_task"
    return Config(
        name="zoom-smolagents",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=4096),
        agent=play,
        rollout=Rollout(
            group_size=8, max_turns=3, max_tokens=2048, max_response_tokens=64, samples="merged", truncated_reward=0.0
        ),
        warm_start=WarmStart(demonstrate=demonstrate, steps=400, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
