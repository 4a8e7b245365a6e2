"""The quickstart's task for a LangGraph agent with a tool whose result is an image.

A model node, a tool node, and the edges between them. The crop is an image in the tool's result. The history is linear, so that an
episode is one row of training.

    pip install 'vlmrl[agents]' langgraph langchain-openai
    python recipes/agents/zoom_langgraph.py
"""

import json
import random

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from PIL import Image

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart, data_uri, load_image

COLORS = ["red", "green", "blue", "yellow"]
QUARTERS = ["top left", "top right", "bottom left", "bottom right"]


async def play(task, client):
    """The agent: it returns the reward, 1 for the right color."""
    image = load_image(task.images[0])

    @tool
    def zoom(quarter: str) -> list:
        """Look closer."""
        return look(crop(image, quarter), "Closer:")

    model = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key).bind_tools([zoom])

    async def ask(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([zoom], handle_tool_errors=True))
    graph.add_edge(START, "ask").add_conditional_edges("ask", tools_condition).add_edge("tools", "ask")
    small = image.resize((32, 32), Image.Resampling.BOX)
    question = {"role": "user", "content": look(small, task.prompt[0]["content"][-1]["text"])}
    state = await graph.compile().ainvoke({"messages": [question]})
    return float(str(state["messages"][-1].content).strip() == task.answer)


def look(image, text):
    """Content of a message: an image and a text."""
    return [{"type": "image_url", "image_url": {"url": data_uri(image)}}, {"type": "text", "text": text}]


def crop(image, quarter):
    """A quarter of the image, at 32 pixels. The model reads the text of the ValueError."""
    half, number = image.width // 2, QUARTERS.index(quarter)
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
        name="zoom-langgraph",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=shapes, size=4096),
        agent=play,
        rollout=Rollout(
            group_size=8, max_turns=3, max_tokens=1024, max_response_tokens=64, samples="merged", truncated_reward=0.0
        ),
        warm_start=WarmStart(demonstrate=demonstrate, steps=400, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=1e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=200, groups_per_batch=16),
        eval=Eval(data=EvalData(generator=shapes, size=256, seed=1), every=50, blank_images=True, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
