"""The blocks of docs/environments.md, run as they stand."""

import re
import sys
from pathlib import Path

import pytest
from aiohttp import web
from testing.episodes import a_task, play_audited
from testing.servers import answering

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()


def test_every_block_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(block, {"__name__": "page"})


def section(title: str) -> dict:
    """What the first Python block under a heading defines."""
    block = re.search(rf"## {title}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(block[1], names)
    return names


def call(name: str, item: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"item": "{item}"}}}}</tool_call>'


def test_the_shop_is_played_to_its_end():
    shop = section("Functions as tools")["ShopEnv"]
    trajectory = play_audited(shop, [call("photo", "tea") + call("price", "jam"), "3.0"], a_task(answer=3.0))
    assert (trajectory.ending, trajectory.reward) == ("env_done", 1.0)
    assert [message["role"] for message in trajectory.turns[1].messages] == ["tool", "tool"]
    assert "Error: jam is not sold here." in str(trajectory.turns[1].messages)
    assert trajectory.turns[1].media[0].image.getpixel((0, 0)) == (0, 128, 0)


@pytest.mark.slow
def test_the_painter_plays_with_a_server_that_is_started_for_it():
    pytest.importorskip("mcp", reason="needs mcp: pip install 'vlmrl[mcp]'")
    server = f"{sys.executable} {Path(__file__).parents[1] / 'env/mcp_server.py'}"
    call = '<tool_call>{"name": "paint", "arguments": {"color": "red"}}</tool_call>'
    trajectory = play_audited(section("MCP servers")["PaintEnv"], [call, "done"], options={"server": server})
    assert trajectory.reward == 1.0 and trajectory.turns[1].media[0].image.getpixel((0, 0)) == (255, 0, 0)


def test_the_cart_is_played_frame_by_frame():
    pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'vlmrl[gymnasium]'")
    env = section("Gymnasium")["CartPoleEnv"]
    trajectory = play_audited(
        env,
        ["left", "up", " ".join(["right"] * 30)],
        a_task("Balance.", seed=1),
        max_tokens=4000,
        max_response_tokens=400,
    )
    assert trajectory.ending == "env_done" and trajectory.reward > 5
    assert [len(turn.media) for turn in trajectory.turns] == [1, 1, 0]


@pytest.mark.slow
def test_the_poem_is_judged_and_its_lines_are_counted():
    async def judge(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "Nearly. <score>7</score>"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    with answering(judge) as url:
        options = {"url": f"{url}/v1", "model": "any"}
        trajectory = play_audited(section("A judge")["PoemEnv"], ["Old pond\na frog leaps in\nsplash"], options=options)
    assert trajectory.reward == pytest.approx(0.9) and trajectory.turns[0].metrics["judge"] == 0.7
