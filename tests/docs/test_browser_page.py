"""The files of docs/browser.md, played as they stand there in a real Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from testing.browser import need_chromium
from testing.browsers import click, opened

from vlmrl.config.code import load_code

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/browser.md"


@pytest.fixture
def example(tmp_path) -> Path:
    need_chromium()
    for body, name in re.findall(r"```\w+\n((?:# |<!-- )(counter\.\w+).*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counter.html", "counter.py"]
    return tmp_path / "counter.py"


@pytest.mark.parametrize("name", ["Counter", "StrictCounter"])
async def test_the_example_is_won_by_as_many_clicks_as_the_page_says(example, name):
    goals = set()
    for seed in range(4):
        async with opened(load_code("env", f"{example}:{name}"), seed=seed, width=320, height=240) as env:
            goal = await env.evaluate("goal")
            goals.add(goal)
            box = "document.querySelector('button').getBoundingClientRect()"
            x, y, width, height = await env.evaluate(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
            button = click((x + width / 2) / 0.32, (y + height / 2) / 0.24)
            for clicks in range(1, goal + 1):
                _, done, info = await env.step(button)
                assert done == (clicks == goal)
            assert info["reward"] == 1.0
    assert len(goals) > 1
