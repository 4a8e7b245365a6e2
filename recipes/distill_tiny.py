"""On-policy distillation on a laptop, without rewards: the teacher sees a crop, the policy only the thumbnail.

Each image has four shapes, and the question is about one of them. The policy sees the whole image at 32 x 32 pixels and names a color.
Its teacher, an average of its own weights, sees the quarter in question, as in Vision-OPD (arXiv 2605.18740). The warm start teaches
both: to name the color of a crop, and to guess at a thumbnail. Distillation then teaches what the thumbnail shows.

    python recipes/distill_tiny.py                                                         # minutes on two cores
    python recipes/distill_tiny.py --teacher.sees recipes/distill_tiny.py:grey_crop        # a control: the teacher sees nothing
    python recipes/distill_tiny.py --teacher.model None --teacher.sees None --algo.advantage grpo --rollout.group-size 8   # GRPO
"""

import random

from PIL import Image

import vlmrl
from vlmrl import Algo, Config, Data, Eval, EvalData, Message, Model, Optim, Rollout, Task, Teacher, Train, WarmStart

COLORS = ["red", "green", "blue", "yellow"]


def demonstrate(task: Task, turn: int) -> str:
    """The right color of a crop; of a thumbnail a guess."""
    return task.answer if task.data["shows_crop"] else random.Random(task.seed).choice(COLORS)


def show_crop(task: Task, trajectory, turn: int) -> list[Message]:
    """What the teacher sees: the same question about the crop."""
    return asked(task, task.data["crop"])


def grey_crop(task: Task, trajectory, turn: int) -> list[Message]:
    """The control: a grey image in the crop's place."""
    return asked(task, Image.new("RGB", task.data["crop"].size, (128, 128, 128)))


def asked(task: Task, image: Image.Image) -> list[Message]:
    (message,) = task.prompt
    parts = [{"type": "image", "image": image} if part["type"] == "image" else part for part in message["content"]]
    return [{**message, "content": parts}]


def reward(text: str, task: Task) -> float:
    """For the curve; with ``algo.advantage none`` it trains nothing."""
    return float(text.strip() == task.answer)


def config() -> Config:
    shapes = "../datasets/shapes.py"
    return Config(
        name="distill_tiny",
        model=Model(path="tiny:qwen3_vl"),
        data=Data(generator=f"{shapes}:make_thumbnail_or_crop", size=4096),
        reward=reward,
        rollout=Rollout(group_size=1, max_tokens=128, max_response_tokens=16),
        warm_start=WarmStart(demonstrate=demonstrate, steps=200, trajectories_per_step=32, lr=1e-3),
        teacher=Teacher(model="average", sees=show_crop, decay=0.95),
        algo=Algo(advantage="none"),
        optim=Optim(lr=3e-4, betas=(0.9, 0.999), warmup_steps=5),
        train=Train(steps=100, groups_per_batch=64),
        eval=Eval(data=EvalData(generator=f"{shapes}:make_thumbnail", size=256, seed=1), every=20, chance=0.25),
    )


if __name__ == "__main__":
    vlmrl.main(config)
