"""Images for the zoom recipe, drawn from a seed: small signs with a letter each, and a question about one of them.

    python datasets/letters.py --out letters.png      # draw two, and one as the agent first sees it

As a task generator: ``Data(generator="../datasets/letters.py:make_task", size=20_000)``. At 192 pixels an image still shows where
each sign is, but its letter cannot be read.
"""

import random
import string
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLORS = {"red": (205, 40, 40), "green": (30, 130, 60), "blue": (45, 75, 205), "orange": (215, 115, 20)}
SHAPES = ("circle", "square", "diamond")
PROMPT = (
    "<image>Which letter is on the {sign}? The image is shown small. Call zoom to look closer at a part of it, as often as you "
    "need, then give the letter between answer tags: <answer>K</answer>"
)


def make_task(index: int, seed: int, side: int = 1024, signs: int = 9) -> dict:
    """Task ``index``: an image of ``side`` pixels with ``signs`` different signs; the answer is the letter on one of them."""
    rng = random.Random(f"{seed}/{index}")
    kinds = rng.sample([(color, shape) for color in COLORS for shape in SHAPES], signs)
    letters = rng.sample(string.ascii_uppercase, signs)
    cells = rng.sample([(column, row) for column in range(5) for row in range(5)], signs)
    image = Image.new("RGB", (side, side), (236, 233, 226))
    for (color, shape), letter, (column, row) in zip(kinds, letters, cells, strict=True):
        x, y = ((place + rng.uniform(0.3, 0.7)) * side / 5 for place in (column, row))
        draw_sign(ImageDraw.Draw(image), x, y, side / 40, COLORS[color], shape, letter)
    color, shape = kinds[0]
    box = [place * side // 5 for place in (*cells[0], cells[0][0] + 1, cells[0][1] + 1)]
    return {"prompt": PROMPT.format(sign=f"{color} {shape}"), "images": [image], "answer": letters[0], "box": box}


def make_question(index: int, seed: int) -> dict:
    """The same without a tool. ``box`` is the part of the image with the sign: left, top, right and bottom in pixels."""
    row = make_task(index, seed)
    question = row["prompt"].partition(" The image is")[0]
    return {**row, "prompt": f"{question} Give the letter between answer tags: <answer>K</answer>"}


def draw_sign(
    pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, fill: tuple, shape: str, letter: str
) -> None:
    """One sign around ``x, y``, with its letter in white, as high as its radius."""
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill)
    elif shape == "square":
        pen.rectangle(box, fill)
    else:
        wide = 1.3 * radius
        pen.polygon([(x, y - wide), (x + wide, y), (x, y + wide), (x - wide, y)], fill)
    pen.text((x, y), letter, "white", ImageFont.load_default(1.2 * radius), anchor="mm")


def main(out: Path = Path("letters.png"), seed: int = 0) -> None:
    """Draw the first two tasks' images, and the first again as the agent sees it before it zooms."""
    tasks = [make_task(index, seed) for index in range(2)]
    images = [task["images"][0] for task in tasks]
    sheet = Image.new("RGB", (2 * 1044 + 212, 1044), "white")
    for place, image in enumerate([*images, images[0].resize((192, 192), Image.Resampling.BOX)]):
        sheet.paste(image, (place * 1044 + 10, 10))
    for task in tasks:
        print(task["prompt"], "->", task["answer"])
    sheet.save(out)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
