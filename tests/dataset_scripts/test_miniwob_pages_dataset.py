"""What MiniWoB++'s pages show for a seed: the same in Python and, where Chromium is, in the page."""

from itertools import islice
from pathlib import Path

import pytest
from testing.browser import need_chromium
from testing.browsers import opened

from vlmrl import MiniWobEnv
from vlmrl.config.code import load_object

PAGES = Path(__file__).parents[2] / "datasets/miniwob_pages.py"
seedrandom, click_color, click_button_sequence, color_task = (
    load_object(f"{PAGES}:{name}") for name in ("seedrandom", "click_color", "click_button_sequence", "color_task")
)


def test_the_numbers_are_those_of_seedrandom():
    """The numbers that its README prints."""
    assert list(islice(seedrandom("hello."), 2)) == [0.9282578795792454, 0.3752569768646784]


def test_held_out_combinations_are_never_trained():
    trained = [color_task(index, seed=1000 * index) for index in range(200)]
    held_out = [color_task(index, seed=1000 * index, held_out=True) for index in range(20)]
    combinations = [{(*task.data["boxes"], task.answer) for task in tasks} for tasks in (trained, held_out)]
    assert not combinations[0] & combinations[1] and len(combinations[0]) > 150
    assert all(task.answer in task.data["boxes"] and task.id == f"click-color/{task.seed}" for task in trained)


@pytest.mark.slow
async def test_a_page_shows_what_its_seed_says():
    need_chromium()
    colors = "[...document.querySelectorAll('#area .color')].map(box => box.dataset.color)"
    boxes_of = "['subbtn', 'subbtn2'].map(id => document.getElementById(id).getBoundingClientRect())"
    centers = f"{boxes_of}.map(box => [box.x + 20, box.y + 20])"
    for seed in (0, 7, 2**31 - 1):
        boxes, wanted = click_color(seed)
        async with opened(MiniWobEnv, seed=seed, tasks="click-color") as env:
            assert await env.evaluate(colors) == boxes
            assert env.prompt[-1]["content"][-1]["text"].strip() == f"Click on the {wanted} colored box."
        async with opened(MiniWobEnv, seed=seed, tasks="click-button-sequence") as env:
            assert await env.evaluate(centers) == [list(center) for center in click_button_sequence(seed)]
