"""An error in a user's own code names the user's file and line: on the console, in trajectories.jsonl and in crash.txt."""

from __future__ import annotations

import json
import sys

import pytest
from testing.episodes import play

from vlmrl.cli import main as cli
from vlmrl.env.base import Env, obs

RECIPE = """
import vlmrl
from vlmrl import Config, Data, Env, Model, Rollout, Train, obs

class Broken(Env):
    def reset(self):
        return self.look()
    def look(self): return 1 / 0  # line 8
    def step(self, response_text): ...

class Fine(Env):
    def step(self, response_text):
        return obs(), True, {"reward": 1.0}

def tasks(index, seed):
    return {"prompt": "Ask", "answer": "a"}

def broken_tasks(index, seed):
    return {"prompt": "Ask", "answer": {}["answer"]}  # line 19

def broken_reward(text, task):
    return task.answer + 1  # line 22

async def broken_agent(task, client):
    raise LookupError("no such tool")  # line 25

def config():
    data = Data(generator=broken_tasks if PART == "generator" else tasks, size=8)
    parts = {"env": Broken, "reward": broken_reward, "agent": broken_agent}
    part = {PART: parts[PART]} if PART in parts else {"env": Fine}
    rollout = Rollout(group_size=2, max_turns=1, max_response_tokens=4, samples="merged")
    train = Train(steps=1, groups_per_batch=1)
    return Config(name="bad", data=data, model=Model(path="tiny:qwen3"), rollout=rollout, train=train, **part)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("env", "ZeroDivisionError: division by zero (mine.py, line 8, in look)"),
        ("generator", "KeyError: 'answer' (mine.py, line 19, in broken_tasks)"),
        ("reward", "(mine.py, line 22, in broken_reward)"),
        ("agent", "line 25, in broken_agent"),
    ],
)
def test_the_line_is_on_the_console_in_the_records_and_in_the_report(part, error, monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE + f"\nPART = {part!r}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vlmrl", "train", "mine.py"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert error in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "runs/bad/trajectories.jsonl").read_text().splitlines()]
    assert records and all(error in record["error"] for record in records if record["error"])
    assert error in (tmp_path / "runs/bad/crash.txt").read_text()


class Raises(Env):
    async def step(self, response_text):  # type: ignore[override]
        raise KeyError("level")


def test_an_async_env_names_its_line_too():
    trajectory = play(Raises, ["a"], max_env_retries_per_turn=0)
    assert "KeyError: 'level' (" in trajectory.error and "test_users_line.py, line " in trajectory.error
    assert trajectory.error.endswith("in step)")


def test_an_error_of_vlmrl_itself_names_no_line():
    class Wrong(Env):
        def step(self, response_text):
            return obs(images=[3]), False, {}

    trajectory = play(Wrong, ["a"], max_env_retries_per_turn=0)
    assert trajectory.error and ", line " not in trajectory.error
