"""The quickstart's task, played by its env and by the agent on the `openai` client: the same tokens, images and logprobs."""

import asyncio
from pathlib import Path

import pytest
from testing.client_episodes import need, play_client
from testing.episodes import new_store, renderer, script, sharp_model

from vlmrl.config import Rollout
from vlmrl.config.code import load_object
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.env.base import resolve_env
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import concat
from vlmrl.types import Task

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
LIMITS = {"max_turns": 2, "max_tokens": 256, "max_response_tokens": 48}
ZOOM = '<tool_call>{"name": "zoom", "arguments": {"bbox": %s}}</tool_call>'


@pytest.fixture(scope="module")
def zoom_agent():
    need("openai")
    return load_object(f"{RECIPES}/agents/zoom_openai.py:play")


def quarter_task(index: int = 0) -> Task:
    row = load_object(f"{RECIPES.parent}/datasets/shapes.py:make_task")(index, 0)
    content = [
        {"type": "image", "image": row["images"][0]},
        {"type": "text", "text": row["prompt"].removeprefix("<image>")},
    ]
    return Task("t", [{"role": "user", "content": content}], row["images"], row["answer"])


def by_env(task, engine, engine_renderer, store):
    """The quickstart's episode, under the id that :func:`play_client` gives it."""
    options = {"coarse": 32, "crop": 32, "tools_in_prompt": False}
    spec = resolve_env(f"{RECIPES.parent}/envs/zoom.py:ZoomEnv", options=options)
    loop = TurnLoop(spec, engine, engine_renderer, store, Rollout(**LIMITS))
    return asyncio.run(loop.play(task, "step/0", "step/0/00"))


def rows_of(trajectory):
    """What is trained: tokens, mask, logprobs, images."""
    (row,) = concat(trajectory)
    return row.token_ids, row.loss_mask, row.rollout_logprobs, row.image_ids


@pytest.mark.parametrize(
    "responses",
    [
        [ZOOM % "[0, 0, 500, 500]", "<answer>%s</answer>"],
        [ZOOM % "[500, 250, 1000, 1000]", "I do not know"],
        ["red", "<answer>%s</answer>"],
        [ZOOM % "[0]", "<answer>pink</answer> or <answer> %s</answer>"],
        [ZOOM % "[0, 0, 1, 1000]", "red"],
        [ZOOM % "[10, 10, 11, 12]", "<answer>%s</answer>"],
        ['<tool_call>{"name": "zoom"}</tool_call> <tool_call>', ""],
        ['<tool_call>{"name": "look", "arguments": {"bbox": [0, 0, 9, 9]}}</tool_call>', "<answer>"],
        ["<answer>%s</answer>"],
        ["a long response " * 9],
    ],
)
def test_the_agent_and_the_env_make_the_same_row_and_reward(zoom_agent, responses):
    task = quarter_task()
    said = [response.replace("%s", task.answer) for response in responses]
    played = play_client(lambda client: zoom_agent(task, client), said, renderer(), **LIMITS)
    env = by_env(task, script(said), renderer(), new_store())
    assert rows_of(played.trajectory)[1:] == rows_of(env)[1:]
    assert renderer().decode(rows_of(played.trajectory)[0]) == renderer().decode(rows_of(env)[0])
    assert played.result == env.reward


def test_the_agent_and_the_env_sample_the_same_on_a_real_model(zoom_agent, qwen3_vl):
    loaded = sharp_model(qwen3_vl)
    sampled = 0
    for index in range(4):
        task = quarter_task(index)
        engine = HFEngine(loaded.policy, loaded.renderer, keep_kv=True)
        played = play_client(
            lambda client, task=task: zoom_agent(task, client),
            engine,
            loaded.renderer,
            store=loaded.new_store(),
            **LIMITS,
        )
        env = by_env(task, engine, loaded.renderer, loaded.new_store())
        engine.close()
        assert rows_of(played.trajectory) == rows_of(env)
        sampled += len(played.trajectory.turns)
    assert sampled > 4  # some episodes have two turns
