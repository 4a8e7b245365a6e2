"""What an OpenEnv server answers fails its trajectory at most, with an error that names the server: the run goes on."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from testing.episodes import play

from vlmrl import OpenEnvEnv, obs
from vlmrl.env import openenv

GOOD = {"first": {"text": "Begin."}, "then": {"text": "Go on."}, "reward": 1.0}


class Shown(OpenEnvEnv):
    def read_action(self, response: str) -> dict[str, Any]:
        return {"say": response}

    def show(self, observation: dict[str, Any]) -> dict[str, Any]:
        return obs(observation["text"])


def played(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Any:
    now = GOOD | answers

    class Client:
        def __init__(self, base_url: str) -> None: ...

        async def reset(self, seed: int) -> Any:
            return SimpleNamespace(observation=now["first"])

        async def step(self, action: Any) -> Any:
            return SimpleNamespace(observation=now["then"], done=False, reward=now["reward"])

        async def close(self) -> None: ...

    monkeypatch.setattr(openenv, "import_extra", lambda package, extra: SimpleNamespace(GenericEnvClient=Client))
    return play(Shown, ["a", "b"], options={"url": "http://env.invalid"}, max_turns=2)


def test_a_server_that_answers_well_plays(monkeypatch: pytest.MonkeyPatch):
    assert played(monkeypatch).reward == 2.0
    assert played(monkeypatch, then={"text": "half \ud800"}).reward == 2.0


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            {"reward": math.nan},
            "OpenEnv server http://env.invalid: a reward must be a number from -1e+15 to 1e+15, but it is nan",
        ),
        ({"reward": math.inf}, "a reward must be a number from -1e+15 to 1e+15, but it is inf"),
        ({"reward": 1e308}, "a reward must be a number from -1e+15 to 1e+15, but it is 1e+308"),
        ({"reward": "much"}, "could not convert string to float"),
        ({"reward": 10**400}, "int too large to convert to float"),
        ({"then": {"text": 5}}, "the text of Shown.show is 5, not a str"),
        ({"then": {"text": ["a"]}}, r"the text of Shown.show is ['a'], not a str"),
        ({"first": {"text": 5}}, "the text of Shown.show is 5, not a str"),
        ({"then": 5}, "TypeError"),
        ({"then": {}}, "KeyError"),
    ],
)
def test_any_other_answer_fails_its_trajectory(answers: Any, reason: str, monkeypatch: pytest.MonkeyPatch):
    trajectory = played(monkeypatch, **answers)
    assert trajectory.ending == "error" and reason in trajectory.error
