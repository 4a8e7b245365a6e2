r"""Distillation over two turns on a laptop CPU, without rewards: the teacher's question contains the answer, the policy must search.

The task is that of `search_tiny.py`: search for a thing, read its color in the passage, and answer with it. The teacher, an average of
the policy's own weights, is asked `What color is the box 372? It is red.` The warm start teaches both: to answer such a question with
its color, right or wrong, and to guess after a search. Distillation then teaches to answer with what the search found.

    python recipes/search_distill.py                                                        # minutes on two cores
    python recipes/search_distill.py --teacher.sees recipes/search_distill.py:any_answer    # a control: the hint is any color
    python recipes/search_distill.py --teacher.model None --teacher.sees None --algo.advantage grpo --rollout.group-size 8 \
        --train.groups-per-batch 8 --train.steps 60                                         # GRPO

To compare from one warm start: `--train.steps 0` first, then `--name NEW --warm-start.steps 0 --model.path runs/NAME/model` with
`--data.generator datasets/lookup.py:make_task`, so that no training task has the answer in it.
"""

import random
import runpy
from dataclasses import replace
from pathlib import Path

import vlmrl
from vlmrl import Algo, Config, Message, Task, Teacher
from vlmrl.rollout.teacher_rows import seen_messages

search_tiny = runpy.run_path(str(Path(__file__).parent / "search_tiny.py"))
COLORS = search_tiny["COLORS"]


def demonstrate(task: Task, turn: int) -> str:
    """The right query, then what the passage says, and the color of the hint, right or wrong; without a hint any color."""
    hint = task.data["hint"]
    if turn == 0 or not hint:
        return search_tiny["demonstrate"](task, turn)
    return f"It is {task.answer}, {'so' if hint == task.answer else 'but'} <answer> {hint}</answer>"


def with_answer(task: Task, trajectory, turn: int) -> list[Message] | None:
    """What the teacher sees: what the policy saw, with the answer after the question."""
    return hinted(task, trajectory, turn, task.answer)


def any_answer(task: Task, trajectory, turn: int) -> list[Message] | None:
    """The control: a hint that does not depend on the answer."""
    return hinted(task, trajectory, turn, random.Random(task.seed).choice(COLORS))


def hinted(task: Task, trajectory, turn: int, color: str) -> list[Message] | None:
    if task.data["hint"]:
        return None  # a question of the warm start, which has one
    question, *others = seen_messages(trajectory, turn)
    return [{**question, "content": f"{question['content']} It is {color}."}, *others]


def config() -> Config:
    base = search_tiny["config"]()
    return replace(
        base,
        name="search_distill",
        data=replace(base.data, generator=f"{search_tiny['LOOKUP']}:make_task_or_hinted"),
        rollout=replace(base.rollout, group_size=1),
        warm_start=replace(base.warm_start, demonstrate=demonstrate),
        teacher=Teacher(model="average", sees=with_answer),
        algo=Algo(advantage="none"),
        train=replace(base.train, steps=25, groups_per_batch=64),
        eval=replace(base.eval, every=5),
    )


if __name__ == "__main__":
    vlmrl.main(config)
