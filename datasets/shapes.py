"""Images for the quickstart, drawn from a seed: a small shape in each quarter, and a question about one of them.

    python datasets/shapes.py --out shapes.png      # look at some

As a generator of tasks: ``Data(generator="../datasets/shapes.py:make_task", size=2048)``. ``make_thumbnail`` shows only a thumbnail of
the image, and has the quarter in question in the column ``crop``.
"""

import random
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 220), "yellow": (240, 200, 40)}
QUARTERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}


def make_task(index: int, seed: int, side: int = 256) -> dict:
    """Task ``index``: an image of ``side`` pixels, and a question whose answer is one of :data:`COLORS`."""
    rng = random.Random(f"{seed}/{index}")
    colors = {quarter: rng.choice(list(COLORS)) for quarter in QUARTERS}
    quarter = rng.choice(list(QUARTERS))
    return {
        "prompt": f"<image>What color is the shape {quarter}?",
        "images": [draw(colors, rng, side)],
        "answer": colors[quarter],
        "quarter": quarter,
    }


def make_thumbnail(index: int, seed: int, side: int = 32) -> dict:
    """The same question about a thumbnail of ``side`` pixels. ``crop`` is the quarter in question, of as many pixels."""
    row = make_task(index, seed)
    (image,), (column, line) = row["images"], QUARTERS[row["quarter"]]
    half = image.width // 2
    quarter = image.crop((column * half, line * half, (column + 1) * half, (line + 1) * half))
    thumbnail, crop = (each.resize((side, side), Image.Resampling.BOX) for each in (image, quarter))
    return {**row, "images": [thumbnail], "crop": crop, "shows_crop": False}


def make_thumbnail_or_crop(index: int, seed: int) -> dict:
    """Every second task shows the crop instead."""
    row = make_thumbnail(index, seed)
    return {**row, "images": [row["crop"]], "shows_crop": True} if index % 2 else row


def draw(colors: dict[str, str], rng: random.Random, side: int) -> Image.Image:
    """A grey image with one shape in each quarter, at a varying position and size."""
    image = Image.new("RGB", (side, side), (128, 128, 128))
    pen = ImageDraw.Draw(image)
    half = side // 2
    for quarter, (column, row) in QUARTERS.items():
        radius = rng.randint(side // 6, side // 5)
        x = column * half + rng.randint(radius, half - radius)
        y = row * half + rng.randint(radius, half - radius)
        box = (x - radius, y - radius, x + radius, y + radius)
        fill = COLORS[colors[quarter]]
        shape = rng.choice(["square", "circle", "triangle"])
        if shape == "square":
            pen.rectangle(box, fill)
        elif shape == "circle":
            pen.ellipse(box, fill)
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill)
    return image


def main(out: Path = Path("shapes.png"), seed: int = 0) -> None:
    """Draw the first eight tasks' images side by side."""
    tasks = [make_task(index, seed) for index in range(8)]
    sheet = Image.new("RGB", (4 * 264, 2 * 264), "white")
    for index, task in enumerate(tasks):
        sheet.paste(task["images"][0], (index % 4 * 264 + 4, index // 4 * 264 + 4))
        print(task["prompt"], "->", task["answer"])
    sheet.save(out)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
