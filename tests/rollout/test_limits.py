"""Limits, cut responses, failures and aborts mean the same whoever plays: the turn loop, a user's generator or an agent."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from testing.agent_episodes import Agent, agent_episode, says
from testing.episodes import completion, new_store, play, renderer, script

from vlmrl import Env, obs
from vlmrl.config import Rollout
from vlmrl.engine.base import EngineError
from vlmrl.gateway.chat import ChatError
from vlmrl.rollout.generator import GeneratorLoop
from vlmrl.types import Task, Trajectory

LIMITS = {"max_turns": 3, "max_tokens": 200, "max_response_tokens": 20}
TASK = Task("t", [{"role": "user", "content": "Hi"}])


class Talks(Env):
    def step(self, response_text):
        return obs("more"), False, {"reward": 1.0}


async def talk(client: Any, renderer: Any, task: Task) -> Trajectory:
    """Asks until a limit refuses."""
    prompt = renderer.prompt(task.prompt).token_ids
    for _ in range(5):
        response = await client.generate(prompt)
        more = renderer.delta([{"role": "user", "content": "more"}], response=response.token_ids).token_ids
        prompt = [*prompt, *response.token_ids, *more]
    return client.trajectory(1.0)


def by_turn_loop(responses: Any, **limits: Any) -> Trajectory:
    return play(Talks, responses, TASK, **(LIMITS | {"truncated_reward": 0.5} | limits))


def by_generator(responses: Any, generate: Any = talk, **limits: Any) -> Trajectory:
    config = Rollout(**(LIMITS | {"truncated_reward": 0.5} | limits))
    loop = GeneratorLoop(generate, script(responses), renderer(), new_store(), config, seed=0)
    return asyncio.run(loop.play(TASK, "g", "g/00"))


def by_agent(responses: Any, **limits: Any) -> Trajectory:
    """An agent that asks until it is refused or its response is cut, without the server and the agent's own process."""
    episode = agent_episode(responses, **(LIMITS | limits))

    async def act() -> None:
        agent = Agent(episode, says("user", "Hi"))
        try:
            while (await agent.ask()).finish_reason != "length":
                agent.messages.append(says("user", "more"))
        except ChatError:
            pass
        episode.finish()

    asyncio.run(act())
    failed = "aborted" if episode.aborted else "error"
    episode.trajectory.ending = failed if episode.failure else episode.limit or "env_done"
    episode.trajectory.error = episode.failure
    return episode.trajectory


PLAYERS = [by_turn_loop, by_generator, by_agent]


def engine(reason: str, text: str = "word") -> Any:
    return lambda request, turn: completion(text, len(request.prompt_ids), reason, end=reason == "stop")


@pytest.mark.parametrize("play", PLAYERS)
def test_the_turn_limit_ends_the_episode(play: Any):
    trajectory = play(engine("stop"), max_turns=2)
    assert (trajectory.ending, len(trajectory.turns)) == ("max_turns", 2)


@pytest.mark.parametrize("play", PLAYERS)
def test_a_prompt_that_leaves_no_room_ends_the_episode(play: Any):
    trajectory = play(engine("stop"), max_turns=50, max_tokens=60)
    assert trajectory.ending == "max_tokens" and trajectory.num_tokens <= 60


@pytest.mark.parametrize("play", PLAYERS)
def test_a_response_that_its_limit_cuts_ends_the_episode_as_length(play: Any):
    size = len(renderer().encode("word"))
    trajectory = play(engine("length"), max_turns=1, max_response_tokens=size)
    # who asks once more is refused by the turn limit, which came later
    assert trajectory.ending == ("max_turns" if play is by_generator else "length")


@pytest.mark.parametrize("play", PLAYERS)
def test_an_engine_that_was_stopped_aborts_and_one_that_fails_is_an_error(play: Any):
    def dies(request: Any, turn: int) -> str:
        raise EngineError("server 3 is gone")

    stopped, died = play(engine("abort")), play(dies)
    assert (stopped.ending, stopped.turns) == ("aborted", [])
    assert (died.ending, died.error, died.turns) == ("error", "server 3 is gone", [])


def test_a_generator_that_returns_after_a_cut_response_is_truncated():
    async def once(client: Any, renderer: Any, task: Task) -> Trajectory:
        await client.generate(renderer.prompt(task.prompt).token_ids)
        return client.trajectory(1.0)

    size = len(renderer().encode("word"))
    cut = by_generator(engine("length"), once, max_response_tokens=size)
    assert (cut.ending, cut.reward) == ("length", 1.0)


def test_a_cut_response_that_nobody_received_ends_nothing():
    size = len(renderer().encode("word"))
    reasons = iter(["length", "stop"])
    responses = lambda request, turn: completion("word", len(request.prompt_ids), next(reasons), end=False)  # noqa: E731
    episode = agent_episode(responses, max_response_tokens=size)

    async def act() -> None:
        episode.undelivered(await Agent(episode, says("user", "Hi")).ask())
        await Agent(episode, says("user", "Hi")).ask()
        episode.finish()

    asyncio.run(act())
    assert (episode.limit, len(episode.trajectory.turns)) == (None, 1)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_generators_reward_that_is_no_number_fails_its_trajectory(reward: float):
    async def once(client: Any, renderer: Any, task: Task) -> Trajectory:
        await client.generate(renderer.prompt(task.prompt).token_ids)
        return client.trajectory(reward)

    trajectory = by_generator(engine("stop"), once)
    assert trajectory.ending == "error" and "its reward must be a finite number" in (trajectory.error or "")


def test_branches_of_a_generator_are_rows_of_their_own():
    async def branches(client: Any, renderer: Any, task: Task) -> Trajectory:
        first = renderer.prompt(task.prompt).token_ids
        other = renderer.prompt([{"role": "user", "content": "Other"}]).token_ids
        a, b = await client.generate(first), await client.generate(other)
        more = renderer.delta([{"role": "user", "content": "more"}], response=a.token_ids).token_ids
        await client.generate([*first, *a.token_ids, *more])
        await client.generate([*other, *b.token_ids, *more])
        return client.trajectory(1.0)

    trajectory = by_generator(engine("stop"), branches, max_turns=4, samples="merged")
    assert [(turn.parent, turn.kept > 0) for turn in trajectory.turns] == [
        (None, False),
        (0, True),
        (None, False),
        (2, True),
    ]


class SetsTools(Talks):
    """As the client of an env server, whose tools come with each session."""

    def reset(self):
        call = {"name": "f", "description": "red " * 300, "parameters": {"type": "object", "properties": {}}}
        self.tools = [{"type": "function", "function": call}]


def test_tools_that_an_env_has_set_fail_its_trajectory_and_are_no_bad_row():
    failed = play(SetsTools, [], TASK, **LIMITS)
    assert (failed.ending, failed.non_retryable) == ("error", False)
    assert "with the 1 tools that its env has set" in failed.error and "rollout.max_tokens (200)" in failed.error
    long = Task("t", [{"role": "user", "content": "red " * 300}])
    assert play(SetsTools, [], long, **LIMITS).non_retryable  # it does not fit without them either
