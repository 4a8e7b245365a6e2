"""MiniWoB++ in a real Chromium: rewards, seeds, and that a replay sees the same pixels."""

from __future__ import annotations

import importlib.util

import pytest
from testing.browser import cannot, need_chromium
from testing.browsers import call, click, opened, shown
from testing.episodes import a_task

from vlmrl import MiniWobEnv
from vlmrl.env.base import resolve_env
from vlmrl.env.browser.miniwob import miniwob_tasks

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()
    if importlib.util.find_spec("miniwob") is None:
        cannot("no MiniWoB++: pip install miniwob.")


async def center(env, selector: str) -> str:
    """A click on the middle of an element."""
    left, top, width, height = await env.evaluate(
        "(each) => { const b = document.querySelector(each).getBoundingClientRect(); return [b.x, b.y, b.width, b.height] }",
        selector,
    )
    return click(1000 * (left + width / 2) / 160, 1000 * (top + height / 2) / 210)


async def test_a_right_click_and_a_wrong_click():
    for selector, raw in (("#subbtn", 1.0), ("#subbtn2", -1.0)):
        async with opened(MiniWobEnv, tasks="click-test-2") as env:
            assert env.prompt[0]["content"][1:] == [
                {"type": "text", "text": "Go."},
                {"type": "text", "text": "\nClick button ONE."},
            ]
            _, done, info = await env.step(click(1, 999))
            assert not done
            _, done, info = await env.step(await center(env, selector))
            assert done and info["reward"] == raw and info["success"] == (raw > 0)


async def test_rewards_and_what_an_unfinished_episode_gets():
    expected = {"raw": (1.0, -1.0), "success": (1.0, 0.0), "timed": (0.8, -1.0)}
    for reward, (right, unfinished) in expected.items():
        async with opened(MiniWobEnv, tasks="click-test", reward=reward, time_limit=10.0) as env:
            assert env.finish("max_turns") == unfinished
            await env.step(click(1, 999))
            await env.step(call("wait", time=1))
            _, done, info = await env.step(await center(env, "#subbtn"))
            assert done and info["reward"] == pytest.approx(right)
        async with opened(MiniWobEnv, tasks="click-test", reward=reward) as env:
            _, done, info = await env.step(call("terminate", status="success"))
            assert done and info["reward"] == unfinished


async def test_the_time_limit_is_in_page_time():
    async with opened(MiniWobEnv, tasks="click-test", time_limit=5.0) as env:
        _, done, _ = await env.step(call("wait", time=4))
        assert not done
        _, done, info = await env.step(call("wait", time=2))
        assert done and info["reward"] == -1
    async with opened(MiniWobEnv, tasks="click-test") as env:
        _, done, _ = await env.step(call("wait", time=60))
        assert not done


@pytest.mark.parametrize(
    "name", ["click-dialog-2", "choose-date-nodelay", "use-colorwheel-2", "enter-text", "drag-box"]
)
async def test_a_replay_sees_the_same_pixels_in_new_and_in_used_tabs(name):
    class Fresh(MiniWobEnv):
        reuse_tabs = False

    responses = [
        click(300, 400),
        call("left_click_drag", coordinate=[700, 800]),
        call("type", text="ab"),
        click(500, 900),
    ]

    async def play(env_class):
        async with opened(env_class, tasks=name, seed=3) as env:
            seen = [env.prompt[0]["content"][0]["image"]]
            for response in responses:
                observation, done, info = await env.step(response)
                seen.append(info.get("reward") if done else shown(observation))
                if done:
                    break
            return seen

    first = await play(MiniWobEnv)
    assert len(set(first)) > 1
    for env_class in (Fresh, MiniWobEnv):
        assert await play(env_class) == first


async def test_an_episode_in_the_loaded_page_is_the_one_after_a_reload():
    async def play(seed, reload):
        async with opened(MiniWobEnv, seed=seed, tasks="click-color", reload=reload) as env:
            loaded = await env.evaluate("performance.timeOrigin")
            random = await env.evaluate("Math.random()")
            _, done, info = await env.step(click(300, 500))
            return (env.prompt[0]["content"][0]["image"], random, done, info["reward"]), loaded

    expected = [await play(seed, reload=True) for seed in (3, 4, 5)]
    assert len({shown for shown, _ in expected}) == len({loaded for _, loaded in expected}) == 3
    again = [await play(seed, reload=False) for seed in (3, 5, 4, 3)]
    assert [seen for seen, _ in again] == [expected[place][0] for place in (0, 2, 1, 0)]
    assert {loaded for _, loaded in again} == {expected[-1][1]}  # the page was not loaded again


async def test_a_page_that_an_episode_has_left_is_loaded_again():
    async with opened(MiniWobEnv, tasks="click-color", reload=False) as env:
        await env.evaluate("location.hash = '#elsewhere'")
        first = env.prompt
    async with opened(MiniWobEnv, tasks="click-color", reload=False) as env:
        assert env.prompt == first
        assert await env.evaluate("location.hash") == ""


def test_the_seed_and_the_column_select_the_task():
    spec = resolve_env(MiniWobEnv, options={"tasks": ["click-test", "click-test-2"]})
    assert {spec.build(a_task(seed=seed)).name for seed in range(8)} == {"click-test", "click-test-2"}
    assert spec.build(a_task(data={"miniwob": "click-button"})).name == "click-button"
    assert len(miniwob_tasks()) > 100
    with pytest.raises(ValueError, match="such as click-test-2, but one is nothing"):
        resolve_env(MiniWobEnv, options={"tasks": "nothing"}).build(a_task())
