"""Episodes of agents over HTTP: rewards, endings and failures. Responses are written."""

from __future__ import annotations

import asyncio
import math
import threading

import httpx
import pytest
from testing.episodes import a_task, image, new_store, renderer, script

from vlmrl.config import Gateway, Rollout
from vlmrl.gateway.agent_loop import AgentLoop
from vlmrl.gateway.agents import Agents, AgentSpec
from vlmrl.multimodal.openai_messages import openai_messages
from vlmrl.samples import audit, emit

pytestmark = pytest.mark.slow

TASK = a_task("What?", [image("red")])


def play(agent, tmp_path, responses=("one", "two", "three", "four"), reward=None, settings=None, count=1, **rollout):
    """The trajectories of ``count`` episodes that are played at the same time, or the only one."""

    async def played():
        return await asyncio.gather(*(loop.play(TASK, "step1/0", f"step1/0/{n:02d}") for n in range(count)))

    limits = {"max_turns": 3, "max_tokens": 500, "max_response_tokens": 50, "samples": "merged"}
    config = Rollout(**(limits | rollout))
    agents = Agents(AgentSpec("seeker", agent, reward=reward), settings or Gateway(), tmp_path / "agents")
    loop = AgentLoop(agents, script(responses), renderer(), new_store(), config, seed=0)
    try:
        trajectories = asyncio.run(played())
    finally:
        agents.close()
    return trajectories[0] if count == 1 else trajectories


async def post(client, messages, **fields):
    """One request, with the plainest client. Returns the assistant's message."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"authorization": f"Bearer {client.api_key}"}
        body = {"model": client.model, "messages": messages, **fields}
        response = await http.post(f"{client.base_url}/chat/completions", json=body, headers=headers)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]


async def ask_twice(task, client):
    messages = openai_messages(task.prompt)
    messages.append(await post(client, messages))
    messages.append({"role": "user", "content": "And then?"})
    last = await post(client, messages)
    return {"reward": float(last["content"] == "two"), "asked": 2}


def test_an_episode_over_http(tmp_path):
    trajectory = play(ask_twice, tmp_path)
    assert (trajectory.ending, trajectory.reward, trajectory.error) == ("env_done", 1.0, None)
    assert [turn.text for turn in trajectory.turns] == ["one", "two"]
    assert trajectory.metrics["asked"] == 2 and trajectory.metrics["agent_seconds"] > 0
    assert trajectory.metrics["requests_continued"] == 1.0
    rows = emit(trajectory, "merged")
    assert len(rows) == 1
    audit(rows, [trajectory], image_token_id=renderer().image_token_id)


def test_agents_play_at_the_same_time(tmp_path):
    barrier = threading.Barrier(4)

    def together(task, client):
        barrier.wait(60)
        return asyncio.run(ask_twice(task, client))

    assert [each.reward for each in play(together, tmp_path, count=4)] == [1.0] * 4


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("good", "it must return a reward, a dict with `reward` and metrics, or None; it returned 'good'"),
        (math.nan, "it returned nan, which is not a finite number"),
        ({"reward": 1, "note": "ok"}, "its 'note' is 'ok', which is not a finite number"),
        (10**400, "cannot be read: OverflowError"),
        ({"reward": 1, "lines": 10**5000}, "cannot be read: "),
        (None, r"the episode ended \(env_done\) without a reward: return one, post one to client.reward_url"),
    ],
)
def test_what_is_no_reward(tmp_path, result, message):
    async def agent(task, client):
        await ask_twice(task, client)
        return result

    trajectory = play(agent, tmp_path)
    assert trajectory.failed and trajectory.error.startswith("agent seeker, task t: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(trajectory.error)


def test_returned_and_posted_rewards_are_added(tmp_path):
    async def agent(task, client):
        await ask_twice(task, client)
        async with httpx.AsyncClient(trust_env=False) as http:
            headers = {"authorization": f"Bearer {client.api_key}"}
            (await http.post(client.reward_url, json={"reward": 0.25}, headers=headers)).raise_for_status()
        return True

    assert play(agent, tmp_path).reward == 1.25


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_gets_the_whole_trajectory(tmp_path, is_async):
    def reward(trajectory):
        assert trajectory.reward == 1.0  # what the agent returned
        return len(trajectory.turns) / 4

    async def later(trajectory):
        return reward(trajectory)

    assert play(ask_twice, tmp_path, reward=later if is_async else reward).reward == 0.5


def test_a_reward_function_that_fails_fails_the_trajectory(tmp_path):
    def broken(trajectory):
        raise KeyError("answer")

    error = play(ask_twice, tmp_path, reward=broken).error
    assert error.startswith(f"agent seeker, task t: reward {broken.__qualname__}: KeyError: 'answer' (")
    assert error.endswith("in broken)") and "test_agent_loop.py, line " in error


def test_an_async_reward_function_that_blocks_is_given_up_and_holds_up_no_event_loop(tmp_path):
    release = threading.Event()

    async def blocks(trajectory):
        assert release.wait(600)

    try:
        error = play(ask_twice, tmp_path, reward=blocks, env_timeout=0.05).error
    finally:
        release.set()
    assert "no answer in 0.05 s; it blocks the event loop of all async rewards" in error


def test_an_agent_that_fails_at_a_budget_is_truncated(tmp_path):
    trajectory = play(ask_twice, tmp_path, max_turns=1, truncated_reward=-1.0)
    assert (trajectory.ending, trajectory.reward, len(trajectory.turns)) == ("max_turns", -1.0, 1)
    trajectory = play(ask_twice, tmp_path, max_turns=1)
    assert trajectory.failed and "set rollout.truncated_reward" in trajectory.error
    assert "The agent failed then: HTTPStatusError" in trajectory.error


def test_an_agent_that_fails_for_itself_is_an_error(tmp_path):
    async def agent(task, client):
        await ask_twice(task, client)
        raise KeyError("bbox")

    trajectory = play(agent, tmp_path, truncated_reward=-1.0)
    assert trajectory.ending == "error" and "agent seeker, task t: KeyError: 'bbox' (" in trajectory.error
    assert len(trajectory.turns) == 2 and not trajectory.non_retryable


def test_an_agent_must_use_the_model(tmp_path):
    async def idle(task, client):
        return 1.0

    assert "it got no response from the model: send requests to client.base_url" in play(idle, tmp_path).error
    error = play(ask_twice, tmp_path, max_tokens=10, max_response_tokens=5).error
    assert "its first request was refused (max_tokens): raise rollout.max_tokens, or send less." in error


def test_requests_after_the_end_are_refused(tmp_path):
    kept = []

    async def agent(task, client):
        kept.append(client)
        await ask_twice(task, client)
        return 1.0

    async def second(task, client):
        with pytest.raises(httpx.HTTPStatusError, match=r"410|404"):
            await post(kept[0], openai_messages(task.prompt))
        await ask_twice(task, client)
        return 1.0

    async def both(task, client):
        return await (second if kept else agent)(task, client)

    async def played():
        return [await loop.play(TASK, "g", f"g/{n}") for n in range(2)]

    agents = Agents(AgentSpec("seeker", both), Gateway(), tmp_path)
    rollout = Rollout(max_turns=3, max_tokens=500, max_response_tokens=50, samples="merged")
    loop = AgentLoop(agents, script(("one", "two", "three")), renderer(), new_store(), rollout, seed=0)
    try:
        assert [each.error for each in asyncio.run(played())] == [None, None]
    finally:
        agents.close()
