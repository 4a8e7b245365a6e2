"""A foreign agent that sums up its own conversation: one episode, whose branches are drawn as a tree."""

from __future__ import annotations

import asyncio
import json

import pytest
from testing.agent_episodes import Agent, agent_episode, says
from testing.browser import Browser
from testing.episodes import image

from vlmrl.gateway.episode import AgentEpisode
from vlmrl.report.records import trajectory_record
from vlmrl.report.viewer.followed_run import FollowedRun
from vlmrl.report.viewer.page import write_snapshot
from vlmrl.types import Trajectory

TASK = says("system", "Find it."), says("user", "Begin.", image("red"))


async def act(episode: AgentEpisode) -> None:
    """Two screens, a summary, twice; then the end. After a summary the conversation is the task and the summary."""
    agent = Agent(episode, *TASK)
    for color in ("blue", "green"):
        await agent.ask()
        await agent.ask(says("user", "Screen.", image(color)))
        summary = await agent.ask(says("user", "Sum up."))
        agent = Agent(episode, *TASK, says("user", f"Before: {summary.content}"))
    await agent.ask()


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    episode = agent_episode([f"a {number}" for number in range(7)])
    asyncio.run(asyncio.wait_for(act(episode), 60))
    episode.finish()
    assert episode.failure is None
    return episode.trajectory


@pytest.mark.slow
def test_the_branches_are_drawn_as_a_tree(trajectory, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"name": "run"}')
    line = json.dumps(trajectory_record(trajectory, 1, "train"))
    (tmp_path / "run/trajectories.jsonl").write_text(f"{line}\n")
    write_snapshot([FollowedRun(tmp_path / "run")], tmp_path / "page.html", "run")
    browser = Browser()
    try:
        browser.open(tmp_path / "page.html", "view=trajectories")
        browser.wait("document.querySelectorAll('#main .path').length === 3")
        assert browser.texts("#main .path button") == ["responses 1\u20133", "responses 4\u20136", "response 7"]
        lines = browser.texts("#main .path .muted")
        for text, number in zip(lines, (2, 5, 6), strict=True):
            assert text.startswith(f"{trajectory.turns[number].length} tokens, ")
        shared = {number: trajectory.turns[number].kept for number in (3, 6)}
        levels = browser.run("[...document.querySelectorAll('#main .path button')].map((b) => b.style.marginLeft)")
        assert levels[0] == "0em" and "0em" not in levels[1:], shared
        assert all("leaves out" in text and "1 image of" in text for text in lines[1:])
    finally:
        browser.quit()
