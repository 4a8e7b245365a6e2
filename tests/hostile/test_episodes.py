"""Whole episodes of hostile responses: each ends in rows that the audit accepts, or in one counted error."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from testing.episodes import a_task, new_store, renderer, script
from testing.hostile import harmless, text

from vlmrl import ToolEnv
from vlmrl.config import Rollout
from vlmrl.env.base import resolve_env
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
