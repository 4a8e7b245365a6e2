"""A small task for learning to search: things with a color each, which only the corpus contains.

    python datasets/lookup.py --out corpus.jsonl      # write it to a file

As a corpus: ``datasets/lookup.py:passages``. As a task generator: ``Data(generator="datasets/lookup.py:make_task", size=7000)``; the
options ``first`` 7000 and ``count`` 200 give questions about the other things.
"""

import json
import random
from pathlib import Path

COLORS = ["red", "green", "blue", "yellow"]
KINDS = ["box", "circle", "image", "letter", "picture", "shape", "square", "triangle"]
THINGS = [f"{kind} {number}" for kind in KINDS for number in range(100, 1000)]  # 7200
random.Random("things").shuffle(THINGS)


def color_of(thing: str) -> str:
    return random.Random(f"color/{thing}").choice(COLORS)


def passages() -> list[dict[str, str]]:
    """A passage for each thing: ``{"id": "box 372", "text": "The box 372 is blue."}``."""
    return [{"id": thing, "text": f"The {thing} is {color_of(thing)}."} for thing in THINGS]


def make_task(index: int, seed: int, first: int = 0, count: int = 7000) -> dict[str, str]:
    """A question about the color of thing ``first + index % count``."""
    thing = THINGS[first + index % count]
    return {"prompt": f"What color is the {thing}?", "answer": color_of(thing), "thing": thing, "hint": ""}


def make_task_or_hinted(index: int, seed: int) -> dict[str, str]:
    """Every second question ends with a hint: any color."""
    row, hint = make_task(index, seed), random.Random(f"hint/{index}").choice(COLORS)
    return {**row, "prompt": f"{row['prompt']} It is {hint}.", "hint": hint} if index % 2 else row


def main(out: Path = Path("corpus.jsonl")) -> None:
    """Write the corpus as a file."""
    out.write_text("".join(json.dumps(passage) + "\n" for passage in passages()))
    print(f"{out}: {len(THINGS)} passages")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
