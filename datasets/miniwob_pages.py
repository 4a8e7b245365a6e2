"""The content of two MiniWoB++ pages for a seed, for demonstrations without a browser.

    python datasets/miniwob_pages.py              # print some

The pages draw from ``Math.seedrandom(seed)`` (github.com/davidbau/seedrandom, RC4); the same numbers are drawn here. As a generator of
tasks for click-color: ``Data(generator="../datasets/miniwob_pages.py:color_task", size=2048)``.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import floor
from zlib import crc32

from vlmrl import Task

COLORS = [
    "red",
    "blue",
    "olive",
    "lime",
    "black",
    "white",
    "grey",
    "purple",
    "orange",
    "yellow",
    "cyan",
    "pink",
    "magenta",
]


PLAIN = {"red", "blue", "black", "white", "purple", "orange", "yellow", "pink"}
"""The colors whose names the tiny models' tokenizer has as one token."""
WANTED = ("red", "blue")


def color_task(index: int, seed: int, held_out: bool = False) -> Task:
    """A page of click-color whose boxes have plain colors and that asks for red or blue: the first from ``seed`` on.

    One combination of the boxes and the wanted color in four is held out. The task has them as ``data["boxes"]`` and ``answer``.
    """
    page = first_page(seed, held_out)
    boxes, wanted = click_color(page)
    prompt = [{"role": "user", "content": ""}]
    return Task(f"click-color/{page}", prompt, answer=wanted, data={"boxes": boxes}, seed=page)


@lru_cache(maxsize=100_000)
def first_page(seed: int, held_out: bool) -> int:
    """The first seed from ``seed`` on whose page is one of them."""
    while True:
        boxes, wanted = click_color(seed)
        is_held_out = crc32(" ".join([*boxes, wanted]).encode()) % 4 == 0
        if wanted in WANTED and set(boxes) <= PLAIN and is_held_out == held_out:
            return seed
        seed += 1


def click_color(seed: int) -> tuple[list[str], str]:
    """The boxes' colors in reading order, and the one to click.

    ``click_color(0)`` is ``(["red", "blue", "grey", "white"], "white")``.
    """
    draw = seedrandom(seed)
    colors = list(COLORS)
    for last in range(len(colors) - 1, -1, -1):
        other = floor(next(draw) * (last + 1))
        colors[last], colors[other] = colors[other], colors[last]
    boxes = colors[:-5:-1]
    return boxes, boxes[floor(next(draw) * 4)]


def click_button_sequence(seed: int) -> list[tuple[int, int]]:
    """The centers of the buttons ONE and TWO in CSS pixels: ``click_button_sequence(0)`` is ``[(24, 80), (89, 132)]``."""
    draw = seedrandom(seed)
    corners = [(floor(next(draw) * 118), floor(next(draw) * 118) + 50) for _ in range(2)]
    return [(left + 20, top + 20) for left, top in corners]


def seedrandom(seed: int | str) -> Iterator[float]:
    """The numbers of JavaScript's ``Math.random()`` after ``Math.seedrandom(seed)``."""
    stream = rc4((seed if isinstance(seed, str) else f"{seed}\0").encode())
    for _ in range(256):
        next(stream)
    while True:
        number, range_, last = 0, 1, 0
        for _ in range(6):
            number, range_ = number * 256 + next(stream), range_ * 256
        while number < 2**52:
            number, range_, last = (number + last) * 256, range_ * 256, next(stream)
        while number >= 2**53:
            number, range_, last = number / 2, range_ / 2, last >> 1
        yield (number + last) / range_


def rc4(key: bytes) -> Iterator[int]:
    """The bytes of the cipher RC4."""
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    i = j = 0
    while True:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        yield state[(state[i] + state[j]) % 256]


def main(count: int = 8) -> None:
    """Print the first pages of click-color."""
    for seed in range(count):
        boxes, wanted = click_color(seed)
        print(f"seed {seed}: {', '.join(boxes)}; click {wanted}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
