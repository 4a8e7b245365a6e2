"""`vlmrl play` plays as a run would: with the history policy and the generator that the options name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vlmrl.cli.play import PlayCommand
from vlmrl.config import Model, Rollout

MINE = """
from vlmrl import Config, Data, Env, Rollout, obs

def tasks(index, seed):
    return {"prompt": f"Question {index}", "answer": index}

class Ask(Env):
    def step(self, response_text):
        return obs(f"Again, {self.turn}."), self.turn == 2, {"reward": 0.5}

def newest(messages, k=2):
    return messages[-k:]

def config():
    rollout = Rollout(max_turns=3, max_response_tokens=8, truncated_reward=0.0)
    return Config(env=Ask, data=Data(generator=tasks, size=9, seed=None), rollout=rollout, name="mine")

async def generate(client, renderer, task):
    prompt = renderer.prompt([{"role": "user", "content": "My own prompt."}])
    await client.generate(prompt.token_ids)
    return client.trajectory(reward=float(task.answer))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(qwen3_vl, env="mine.py:Ask", **rollout):
    limits = {"max_turns": 3, "max_response_tokens": 8, "truncated_reward": 0.0} | rollout
    return PlayCommand(env=env, data="mine.py:tasks", n=2, model=Model(path=str(qwen3_vl)), rollout=Rollout(**limits))


def test_a_generator_plays_by_itself(qwen3_vl, folder, capsys):
    settings(qwen3_vl, env=None, generate="mine.py:generate").run([])
    output = capsys.readouterr().out
    assert output.count("My own prompt.") == 2 and "Question" not in output.replace("question", "")
    assert "2 episodes, mean reward 0.500" in output


def test_an_env_and_a_generator_are_too_many(qwen3_vl, folder):
    with pytest.raises(ValueError, match="generate plays whole episodes itself"):
        settings(qwen3_vl, generate="mine.py:generate").run([])


def test_tasks_must_be_named(folder):
    with pytest.raises(ValueError, match="--data must be set"):
        PlayCommand(env="mine.py:Ask").run([])


def test_a_recipe_is_played_with_its_settings_and_leaves_no_run(qwen3_vl, folder, capsys):
    PlayCommand(env="mine.py").run(["-n", "2", "--model.path", str(qwen3_vl), "--rollout.truncated-reward", "0.5"])
    output = capsys.readouterr().out
    assert "Question 0" in output and "Question 1" in output and "2 episodes, mean reward 0.500" in output
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["mine.py"]
    with pytest.raises(ValueError, match="engine must be embedded with vlmrl play"):
        PlayCommand(env="mine.py").run(["--engine", "sglang"])


@pytest.mark.slow
@pytest.mark.parametrize("what", [["mine.py:Ask", "--data", "mine.py:tasks"], ["mine.py"]])
def test_the_history_policy_rewrites_what_is_read_by_hand(qwen3_vl, folder, what):
    """Typed by hand, each prompt is shown where it differs from the last: with the policy, the question is gone in the third."""
    options = ["--rollout.history", "mine.py:newest"]
    options += ["--rollout.history-options", "k", "2", "--model.path", str(qwen3_vl), "-n", "1", "--by-hand"]
    command = [sys.executable, "-m", "vlmrl", "play", *what, *options]
    done = subprocess.run(command, input="one\ntwo\nthree\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third, _ = done.stdout.split("response> ")
    assert "Question 0" in first and "Again" not in first
    assert "one" in second and "Again, 0." in second and "Question" not in second
    assert "two" in third and "Again, 1." in third and "one" not in third
