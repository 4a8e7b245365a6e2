"""An error in a user's own code names the user's file and line: on the console, in trajectories.jsonl and in crash.txt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from testing.episodes import play

from vlmrl import ToolEnv
from vlmrl.cli import main as cli
from vlmrl.env.base import Env, obs
from vlmrl.env.session import EnvContractError
from vlmrl.utils.users_line import defined_at

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


class Wrong(Env):
    def __init__(self, task, answer):
        self.answer = answer

    def step(self, response_text):
        return self.answer


WRONG = f" (tests/cli/test_users_line.py, line {Wrong.step.__code__.co_firstlineno}, in step)."


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [
        (None, "it returned None"),
        ([obs(), True, {}], "it returned [{'obs_str': ''}, True, {}]"),
        ((obs("x"), False), "it returned 2 elements: ({'obs_str': 'x'}, False)"),
        ((obs("x"), 1.0, True, False, {}), "it returned 5 elements: ({'obs_str': 'x'}, 1.0, True, False, {})"),
        (("Which?", False, {}), "its first element is a str; wrap it: obs('Which?')"),
        ((None, True, {}), "its first element is None; make it with obs(...)"),
        (
            ({"text": "x"}, False, {}),
            "its first element, {'text': 'x'}, has no text and no image; make it with obs(...)",
        ),
        ((obs(), 1.0, {}), "its second element, done, must be True or False, and is 1.0; the reward is info['reward']"),
        (
            (obs(), np.float32(1), {}),
            "its second element, done, must be True or False, and is np.float32(1.0); the reward is info['reward']",
        ),
        (
            (obs(), "no", {}),
            "its second element, done, must be True or False, and is 'no'; the reward is info['reward']",
        ),
        ((obs(), True, 1.0), "its third element, info, must be a dict, and is 1.0"),
    ],
)
def test_what_step_returned_wrong_is_named_with_the_line_of_step(answer, mistake, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(EnvContractError) as error:
        play(lambda task: Wrong(task, answer), ["a"])
    assert str(error.value).endswith(f": step must return (obs(...), done, info), but {mistake}{WRONG}")


def test_a_reward_of_a_wrong_type_and_no_image_source_name_the_line_of_step(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(EnvContractError) as error:
        play(lambda task: Wrong(task, (obs(), True, {"reward": "right"})), ["a"])
    assert str(error.value).endswith(f": info['reward'] must be a finite number, but it is 'right'{WRONG}")
    trajectory = play(lambda task: Wrong(task, (obs(images=[3]), False, {})), ["a"], max_env_retries_per_turn=0)
    assert trajectory.error and trajectory.error.endswith(f"not a int{WRONG}")
    frame = np.zeros((32, 32, 3), np.uint8)
    trajectory = play(lambda task: Wrong(task, (obs(images=[frame]), False, {})), ["a"], max_env_retries_per_turn=0)
    assert trajectory.error and trajectory.error.endswith(
        "an image does not load: array [32, 32, 3]: an image is a PIL image, bytes, a path, a URL or a data URI, not a ndarray: pass "
        f"PIL.Image.fromarray(array){WRONG}"
    )


def test_a_function_of_vlmrl_or_of_a_package_is_no_line_of_the_user():
    assert [defined_at(function) for function in (ToolEnv.step, pytest.skip, len)] == [""] * 3
