"""A recipe for a model with random weights: problems with diagrams, and a reward that such a model can raise.

    vlmrl train benchmarks/geometry_recipe.py

The problems are those of Geometry3K in `$VLMRL_SHARED/data/geometry3k` where they are, otherwise drawn here. The reward is not for the
answer but for responses that the tiny tokenizer can decode: it has 500 of a 2B's 151,936 ids.
"""

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import vlmrl
from vlmrl import Config, Data, Model, Optim, Rollout, Task, Train

SHARED = Path(os.environ.get("VLMRL_SHARED") or Path(__file__).resolve().parents[2] / "shared")
FOLDER = SHARED / "data/geometry3k"
SIZE = 512


@cache
def problems() -> list[dict[str, Any]]:
    """The rows of Geometry3K; none where it is not at hand."""
    file = FOLDER / "geometry3k.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["image"]][:SIZE]


def task(index: int, seed: int) -> dict[str, Any]:
    if problems():
        row = problems()[index % len(problems())]
        images, problem, answer = [str(FOLDER / row["image"])], row["problem_text"], row["answer_text"]
    else:
        image, problem, answer = drawn(index)
        images = [image]
    return {"prompt": f"<image>{problem}", "images": images, "answer": answer}


def drawn(index: int) -> tuple[Image.Image, str, str]:
    """A right triangle with its two legs, to be solved for the hypotenuse."""
    dice = random.Random(index)
    one, other = dice.randint(3, 30), dice.randint(3, 30)
    width, height = dice.randrange(160, 480, 32), dice.randrange(160, 480, 32)
    image = Image.new("RGB", (width, height), "white")
    pen, corners = ImageDraw.Draw(image), [(20, 20), (20, height - 20), (width - 20, height - 20)]
    pen.polygon(corners, outline="black", width=2)
    pen.text((24, height // 2), str(one), fill="black")
    pen.text((width // 2, height - 18), str(other), fill="black")
    return image, "Find the hypotenuse of the right triangle.", f"{(one**2 + other**2) ** 0.5:.2f}"


def reward(text: str, task: Task) -> float:
    """The number of characters that were decoded, at most 1 for 64."""
    return min(1.0, sum(character.isascii() for character in text) / 64)


def config() -> Config:
    return Config(
        name="geometry",
        model=Model(path="tiny:qwen3_vl", max_image_pixels=512 * 512),
        data=Data(generator=task, size=SIZE, max_prompt_tokens=896),
        reward=reward,
        rollout=Rollout(group_size=8, max_tokens=1024, max_response_tokens=128),
        optim=Optim(lr=2e-5),
        train=Train(steps=20, groups_per_batch=16),
        save_model=False,
    )


if __name__ == "__main__":
    vlmrl.main(config)
