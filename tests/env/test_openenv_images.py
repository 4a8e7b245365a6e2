"""An OpenEnv server's observation cannot make this machine open a path or a URL, however its env shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from testing.episodes import image, play
from testing.hostile import CANARY, CANARY_HOST, harmless

from vlmrl import OpenEnvEnv, obs
from vlmrl.env import openenv

BOARD = image("red")


class Client:
    """Shows a board at the start, and then what the action names."""

    def __init__(self, base_url: str) -> None:
        pass

    async def reset(self, seed: int) -> Any:
        return SimpleNamespace(observation={"board": BOARD})

    async def step(self, action: Any) -> Any:
        return SimpleNamespace(observation={"board": action}, done=False, reward=1.0)

    async def close(self) -> None:
        pass


class Board(OpenEnvEnv):
    def read_action(self, response: str) -> Any:
        return BOARD if response == "red" else response

    def show(self, observation: dict[str, Any]) -> dict[str, Any]:
        return obs("Board:", images=[observation["board"]])


def test_only_images_that_the_server_sent_whole_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openenv, "import_extra", lambda package, extra: SimpleNamespace(GenericEnvClient=Client))
    good = play(Board, ["red", "red"], options={"url": "http://env.invalid"}, max_turns=2)
    assert (good.ending, good.reward, len(good.turns[1].media)) == ("max_turns", 2.0, 1)
    for name in (CANARY, f"file://{CANARY}", f"http://{CANARY_HOST}/a.png", "data:image/png,AAAA"):
        with harmless(name):
            bad = play(Board, [name, "red"], options={"url": "http://env.invalid"}, max_turns=2)
        assert (
            bad.ending == "error" and "an image of Board.show must be pixels, encoded bytes or a data URI" in bad.error
        )
