"""A tiny text model learns to answer with what its search found, on a laptop CPU in a few minutes.

A question is about the color of a thing, which only the corpus contains. The agent searches for the thing, reads the passage in the
middle of the episode, repeats the color that it read, and answers. 300 supervised warm-start steps teach this format; their answers
are random colors, so reward begins at guessing (0.25). Reinforcement learning teaches the agent to answer with the color that it
read. The held-out tasks are about things that do not occur in training.

    pip install 'vlmrl[search]'
    python recipes/search_tiny.py
    python recipes/search_tiny.py --env-options.retriever nothing      # a control: the retriever finds nothing
"""

import random
from pathlib import Path

import vlmrl
from vlmrl import Config, Data, Eval, EvalData, Model, Optim, Rollout, Task, Train, WarmStart

LOOKUP = Path(__file__).parent.parent / "datasets/lookup.py"
COLORS = ["red", "green", "blue", "yellow"]


def demonstrate(task: Task, turn: int) -> str:
    """The response to imitate: the right query, then what the passage says and any color: `It is red, but <answer> blue</answer>`."""
    if turn == 0:
        return f"<search>{task.data['thing']}</search>"
    answer = random.Random(task.seed).choice(COLORS)
    return f"It is {task.answer}, {'so' if answer == task.answer else 'but'} <answer> {answer}</answer>"


def config() -> Config:
    tasks = f"{LOOKUP}:make_task"
    return Config(
        name="search_tiny",
        model=Model(path="tiny:qwen3"),
        data=Data(generator=tasks, size=7000),
        env="../envs/search/env.py:SearchEnv",
        env_options={"retriever": "bm25", "corpus": f"{LOOKUP}:passages", "topk": 1, "instructions": False},
        rollout=Rollout(
            group_size=8, max_turns=3, max_tokens=256, max_response_tokens=32, stop=("</search>", "</answer>")
        ),
        warm_start=WarmStart(demonstrate=demonstrate, steps=300, trajectories_per_step=32, lr=1e-3),
        optim=Optim(lr=2e-4, betas=(0.9, 0.999), warmup_steps=10),
        train=Train(steps=80, groups_per_batch=16),
        eval=Eval(
            data=EvalData(generator=tasks, size=200, options={"first": 7000, "count": 200}), every=20, chance=0.25
        ),
    )


if __name__ == "__main__":
    vlmrl.main(config)
