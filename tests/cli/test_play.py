"""`vlmrl play` plays as a run would: with the history policy and the generator that the options name."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from vlmrl.cli import main as cli
from vlmrl.cli.play import PlayCommand, _summary
from vlmrl.types import Task, Trajectory

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


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VLMRL_CACHE", str(path))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(qwen3_vl, *options, env=None):
    limits = ["-n", "2", "--rollout.max-response-tokens", "8", "--model.path", str(qwen3_vl)]
    PlayCommand(env).run(["--data.generator", "mine.py:tasks", *limits, *options])


def test_a_generator_plays_by_itself(qwen3_vl, folder, capsys):
    play(qwen3_vl, "--rollout.generate", "mine.py:generate")
    output = capsys.readouterr().out
    assert output.count("My own prompt.") == 2 and "Question" not in output.replace("question", "")
    assert "2 episodes, mean reward 0.500" in output


def test_a_folder_that_another_user_made_in_tmp_is_not_used(qwen3_vl, folder, cache, monkeypatch, capsys):
    (folder / "theirs").mkdir()
    (folder / "tmp").mkdir()
    (folder / "tmp/vlmrl-play").symlink_to(folder / "theirs")
    before = (folder / "theirs").stat().st_mtime_ns
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    play(qwen3_vl, "--rollout.generate", "mine.py:generate")
    assert "mean reward 0.500" in capsys.readouterr().out
    assert (folder / "theirs").stat().st_mtime_ns == before and not any((cache / "play").glob("play-*"))


def test_an_env_and_a_generator_are_too_many(qwen3_vl, folder):
    with pytest.raises(ValueError, match="generate plays whole episodes itself"):
        play(qwen3_vl, "--rollout.generate", "mine.py:generate", env="mine.py:Ask")


def test_tasks_must_be_named(folder):
    with pytest.raises(ValueError, match="data must be set"):
        PlayCommand("mine.py:Ask").run([])


def test_a_recipe_is_played_with_its_settings_and_leaves_no_run(qwen3_vl, folder, capsys):
    PlayCommand(env="mine.py").run(["-n", "2", "--model.path", str(qwen3_vl), "--rollout.truncated-reward", "0.5"])
    output = capsys.readouterr().out
    assert "Question 0" in output and "Question 1" in output and "2 episodes, mean reward 0.500" in output
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["mine.py"]
    with pytest.raises(ValueError, match="engine must be embedded with vlmrl play"):
        PlayCommand(env="mine.py").run(["--engine", "sglang"])


BY_HAND = """
from PIL import Image
from vlmrl import Env, obs

def tasks(index, seed):
    return {"prompt": "<image>Which color?", "images": [Image.new("RGB", (32, 32), "red")], "answer": "red"}

class Look(Env):
    unfinished_reward = 0.0

    def step(self, response_text):
        if response_text == "fail":
            raise KeyError("crop")
        return obs("Again."), response_text == "red", {"reward": 1.0, "words": len(response_text.split())}
"""


def test_by_hand_says_what_is_cut_shows_metrics_and_keeps_images_and_page(qwen3_vl, tmp_path, monkeypatch, capsys):
    """A response that is too long, an episode that fails, one that is complete, and one that ends with the input."""
    (tmp_path / "look.py").write_text(BY_HAND)
    monkeypatch.chdir(tmp_path)
    typed = "".join(f"{line}\n" for line in ("a b c d e f g h i j k l m", "fail", "look here", "red", "blue"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    words = ["--data.generator", "look.py:tasks", "--by-hand", "--page", "page.html", "-n", "4"]
    words += ["--rollout.max-env-retries-per-turn", "0", "--rollout.max-turns", "3"]
    with pytest.raises(KeyboardInterrupt):
        PlayCommand("look.py:Look").run([*words, "--rollout.max-response-tokens", "12", "--model.path", str(qwen3_vl)])
    output = capsys.readouterr().out
    assert re.search(r"your response has \d\d tokens and is cut to 12: rollout.max_response_tokens is 12", output)
    assert (
        "length (a response was cut at rollout.max_response_tokens, and step() was not called with it), reward 0"
        in output
    )
    assert "images: 32x32 px, 1 token\n" in output
    assert "error, reward none: env Look" in output and "KeyError: 'crop' (look.py, line 13, in step)" in output
    assert "turn 0> look here  reward 1  words 2" in output and "env_done, reward 2" in output
    assert "\n3 episodes, of which 1 failed, mean reward 1.000\n" in output
    assert "episodes with images: page.html" in output and "look here" in Path("page.html").read_text()
    images = re.findall(r"image 0: (.*\.png)", output)
    assert len(images) == 4 and all(Image.open(image).size == (32, 32) for image in images)
    shutil.rmtree(Path(images[0]).parent)


def test_a_summary_counts_failed_episodes_but_no_reward_of_theirs():
    def ended(ending, reward):
        return Trajectory("t", "g", Task("t", []), ending=ending, final_reward=reward)

    assert _summary([ended("error", None)]) == "1 episode, of which 1 failed, mean reward none"
    assert _summary([ended("error", 5.0), ended("env_done", 1.0)]) == "2 episodes, of which 1 failed, mean reward 1.000"
    assert _summary([]) == "0 episodes, mean reward none"


def test_a_backslash_continues_a_response_that_is_typed(qwen3_vl, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("<tool_call>\\\n{}\\\n</tool_call>\ntwo\n"))
    options = ["--data.generator", "mine.py:tasks", "--rollout.max-turns", "2", "--model.path", str(qwen3_vl)]
    monkeypatch.setattr(sys, "argv", ["vlmrl", "play", "mine.py:Ask", *options, "-n", "1", "--by-hand"])
    cli.main()
    output = capsys.readouterr().out
    assert "turn 0> <tool_call>\n{}\n</tool_call>" in output and "turn 1> two" in output


@pytest.mark.parametrize("what", [["mine.py:Ask", "--data.generator", "mine.py:tasks"], ["mine.py"]])
def test_the_history_policy_rewrites_what_is_read_by_hand(qwen3_vl, folder, what, monkeypatch, capsys):
    """Typed by hand, each prompt is shown where it differs from the last: with the policy, the question is gone in the third."""
    options = ["--rollout.history", "mine.py:newest"]
    options += ["--rollout.history-options", "k", "2", "--model.path", str(qwen3_vl), "-n", "1", "--by-hand"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    monkeypatch.setattr(sys, "argv", ["vlmrl", "play", *what, *options])
    cli.main()
    first, second, third, _ = capsys.readouterr().out.split("response> ")
    assert "Question 0" in first and "Again" not in first
    assert "one" in second and "Again, 0." in second and "Question" not in second
    assert "two" in third and "Again, 1." in third and "one" not in third
