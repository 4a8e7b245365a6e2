"""The tiny recipe on MiniWoB++, in real Chromium: what a demonstration does, and what a window of images keeps."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from testing.browser import need_chromium
from testing.browsers import opened
from testing.episodes import a_task, renderer, turn_loop

from vlmrl.config.code import load_object
from vlmrl.rollout.history_policies import keep_last_images
from vlmrl.samples import audit, step_wise

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes/miniwob_tiny.py"
PAGES = (ROOT / "datasets/miniwob_pages.py", "color_task")


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()


def test_demonstrated_clicks_are_right_once_in_four_times():
    """The page rewards the clicks on the box that the task asks for, and no others."""
    config = load_object(f"{TINY}:config")()
    demonstrate, color_task = (load_object(f"{file}:{name}") for file, name in ((TINY, "demonstrate"), PAGES))
    tasks = [color_task(index, seed=1000 * index) for index in range(100)]
    right = [clicked_color(task, demonstrate(task, 0)) == task.answer for task in tasks]
    assert 10 <= sum(right) <= 40

    async def play(task):
        async with opened(config.env, seed=task.seed, **config.env_options) as env:
            _, done, info = await env.step(demonstrate(task, 0))
            return done and info["reward"]

    shown = [right.index(True), right.index(False)]
    assert [asyncio.run(play(tasks[index])) for index in shown] == [1.0, 0.0]


def clicked_color(task, response: str) -> str:
    centers = load_object(f"{TINY}:CENTERS")
    x, y = map(int, response.rpartition("!")[2].split())
    return task.data["boxes"][centers.index((x, y))]


@pytest.mark.parametrize("window", [1, 2, None])
def test_what_is_trained_on_has_the_last_screenshots_that_the_window_keeps(window):
    """Two clicks beside the buttons, which change nothing, and then the right ones."""
    seed = 3
    centers = load_object(f"{PAGES[0]}:click_button_sequence")(seed)
    responses = [f"! {1000 * x // 160} {1000 * y // 210}" for x, y in [(10, 60), (10, 60), *centers]]
    env = load_object(f"{TINY}:ClickEnv")
    options = {"tasks": "click-button-sequence", "reward": "success", "scale": 0.4, "tools_in_prompt": False}
    loop = turn_loop(env, responses, options=options, history="rerender", samples="step_wise")
    loop.history_policy = list if window is None else partial(keep_last_images, k=window)
    trajectory = asyncio.run(loop.play(a_task(seed=seed), "g", "g/00"))
    assert trajectory.reward == 1.0 and len(trajectory.turns) == 4
    rows = step_wise(trajectory)
    audit(rows, [trajectory], image_token_id=renderer().image_token_id)
    assert [len(row.media) for row in rows] == [min(shown, window or 4) for shown in (1, 2, 3, 4)]
