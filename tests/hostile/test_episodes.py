"""Whole episodes of hostile responses, env answers and task rows: each ends in rows that the audit accepts, or in one
counted error."""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from testing.episodes import a_task, new_store, renderer, script
from testing.hostile import CANARY, CANARY_HOST, harmless, text, value

from vlmrl import Env, ToolEnv, obs
from vlmrl.config import Rollout
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvContractError
from vlmrl.rollout.runner import Runner
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat, merge_prefixes, step_wise
from vlmrl.types import Task, Trajectory

ENVS = Path(__file__).parents[2] / "envs"
BANNED = re.compile(r"<\|(image|video)_pad\|>")  # an engine never samples these ids


class Echo(ToolEnv):
    """Shows the model what it wrote, as a tool and as an observation."""

    unfinished_reward = 0.0

    def say(self, words: str) -> str:
        """Say something.

        Args:
            words: What to say.
        """
        return words

    functions = (say,)

    def judge(self, response: str) -> dict[str, float]:
        return {"reward": float("5" in response)}


class Odd(Env):
    """Answers with whatever the task's generator of random numbers makes."""

    unfinished_reward = 0.0

    def step(self, response_text: str) -> Any:
        rng = random.Random(f"{self.task.seed} {self.turn}")
        if rng.random() < 0.2:
            return value(rng)
        observation = obs(text(rng), images=[odd_image(rng)] if rng.random() < 0.4 else None)
        if rng.random() < 0.2:
            observation = value(rng)
        info = {"reward": 1.0} if rng.random() < 0.7 else {"reward": value(rng), "metric": value(rng)}
        return observation, rng.random() < 0.3, info


def odd_image(rng: random.Random) -> Any:
    sizes = [(64, 32), (1, 1), (256, 1), (1, 300), (3000, 2), (0, 5), (28, 28)]
    image = Image.new(rng.choice(["RGB", "L", "RGBA", "1", "F", "CMYK", "I;16"]), rng.choice(sizes))
    return rng.choice(
        [image, image, image, b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0", None, 7, "data:image/png;base64,AAAA"]
    )


def runner(env: Any, rng: random.Random) -> Runner:
    limits = Rollout(
        group_size=2,
        max_turns=3,
        max_tokens=6000,
        max_response_tokens=40_000,
        env_timeout=120.0,
        max_failed_fraction=1.0,
        max_refills=0,
        history=rng.choice(["append", "append", "inline"]),
    )
    engine = script(lambda request, turn: BANNED.sub("", text(rng)))
    return Runner(TurnLoop(resolve_env(env), engine, renderer(), new_store(), limits))


def play(env: Any, task: Task, rng: random.Random) -> list[Trajectory]:
    ended: list[Trajectory] = []
    asyncio.run(runner(env, rng).play(iter([task]), 1, "hostile", ended.append))
    return ended


def check(trajectories: list[Trajectory]) -> None:
    """Each trajectory failed with a reason, or has a reward and rows that can be trained on."""
    assert len(trajectories) == 2
    for trajectory in trajectories:
        if trajectory.failed:
            assert trajectory.error
            continue
        for rows in (concat(trajectory), step_wise(trajectory), merge_prefixes(step_wise(trajectory))):
            audit(rows, [trajectory], image_token_id=renderer().image_token_id, banned_ids=[])


@pytest.mark.parametrize(
    "env",
    [pytest.param("geo3k.py:Geo3kEnv", marks=pytest.mark.slow), "zoom.py:ZoomEnv", "frozenlake.py:FrozenLakeEnv"],
)
def test_hostile_responses_to_the_envs_of_the_project(env, hostile):
    for rng in hostile(env):
        task = a_task(images=[Image.new("RGB", (64, 32), "red")], answer="42", data={"choices": []}, seed=1)
        with harmless(env, allowed=("bounded_worker.py",)):  # the process of geo3k's mathematics
            trajectories = play(f"{ENVS}/{env}", task, rng)
        assert not any(trajectory.failed for trajectory in trajectories), trajectories[0].error
        check(trajectories)


def test_hostile_responses_that_come_back_as_observations(hostile):
    for rng in hostile("echo"):
        with harmless("echo"):
            trajectories = play(Echo, a_task(), rng)
        assert not any(trajectory.failed for trajectory in trajectories), trajectories[0].error
        check(trajectories)


def test_hostile_env_answers(hostile):
    for index, rng in enumerate(hostile("odd")):
        # An env may name a file, since it is the user's own code; and what it always does wrong ends the run, by name.
        with harmless(index, allowed=(CANARY, CANARY_HOST)), suppress(EnvContractError):
            check(play(Odd, a_task(seed=index), rng))


def test_hostile_task_rows(hostile):
    for index, rng in enumerate(hostile("tasks")):
        task = a_task(
            text(rng), [odd_image(rng)] if rng.random() < 0.5 else [], answer=value(rng), data={"x": value(rng)}
        )
        with harmless(index):
            check(play(Echo, task, rng))
