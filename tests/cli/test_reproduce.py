"""`vlmrl reproduce` on a recipe of one step, in processes of its own as users run it, and what it refuses."""

import json
import re
import sys
from pathlib import Path

import pytest

from vlmrl.cli import main as cli

RECIPE = """
from vlmrl import Config, Data, Eval, Optim, Rollout, Train


def tasks(index, seed):
    return {"prompt": "Say a.", "answer": "a"}


def reward(text, task):
    return float("a" in text)


def config():
    return Config(
        name="say",
        model={model},
        data=Data(generator=tasks, size=16, held_out=4),
        reward=reward,
        rollout=Rollout(group_size=4, max_tokens=64, max_response_tokens=8),
        optim=Optim(lr=1e-3),
        train=Train(steps=9, groups_per_batch=4),
        eval=Eval(samples_per_task=2, chance=0.1),
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    model = 'Model(path="tiny:qwen3")'
    (tmp_path / "recipe.py").write_text(RECIPE.replace("{model}", model).replace("Eval, Opt", "Eval, Model, Opt"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reproduce(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["vlmrl", "reproduce", "recipe.py", *arguments])
    cli.main()


@pytest.mark.slow
def test_a_short_recipe_is_reproduced_once(folder, monkeypatch, capfd):
    command = ["--seeds", "5", "--controls", "--train.steps", "1", "--optim.lr", "1e-4"]
    reproduce(monkeypatch, *command)
    (results,) = folder.glob("runs/reproduce/say-*/results.md")
    page = results.read_text()
    assert page.startswith("### say, with other settings\n")
    assert "vlmrl reproduce recipe.py --seeds 5 --controls --train.steps 1 --optim.lr 1e-4\n" in page
    assert "| seed 5 | " in page
    config = json.loads((results.parent / "say-seed5/config.json").read_text())
    assert (config["seed"], config["train"]["steps"], config["optim"]["lr"]) == (5, 1, 1e-4)
    assert "vlmrl train" in capfd.readouterr().out
    reproduce(monkeypatch, *command)
    assert "vlmrl train" not in capfd.readouterr().out and results.read_text() == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "3"], "--seed must be left to vlmrl reproduce"),
        (["--name=x"], "--name must be left to vlmrl reproduce"),
        (["--no-save-model", "--data.path", "x.jsonl"], "save_model must be True"),  # a path replaces the generator
        (["--data.held-out", "0"], "there are no held-out tasks to evaluate on"),
        # said after all seeds were trained
        (["--algo.credit", "turn", "--controls", "shuffled"], "train.shuffle_rewards must be False unless algo.credit"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line(folder, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit, match="1"):
        reproduce(monkeypatch, *arguments)
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: ") and message in error and not (folder / "runs").exists()


def test_seeds_that_repeat_are_refused(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        reproduce(monkeypatch, "--seeds", "1", "1")
    shown = capsys.readouterr()
    assert "different numbers" in shown.err + shown.out and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("options", "titles"),
    [([], ["seed 0", "shuffled rewards, seed 0"]), (["--algo.credit", "turn"], ["seed 0"])],
)
def test_the_usual_controls_are_those_that_the_recipe_can_have(folder, monkeypatch, options, titles):
    """With credit by turn, rewards cannot be shuffled: the command ended with that error, after all seeds."""

    planned: list[str] = []

    def stop(experiments, launch, say):
        planned.extend(each.title for each in experiments)
        raise KeyboardInterrupt

    monkeypatch.setattr("vlmrl.run.reproduction.reproduce", stop)
    with pytest.raises(SystemExit):
        reproduce(monkeypatch, "--seeds", "0", *options)
    assert planned == titles


@pytest.mark.parametrize("edited", ["recipe.py", "score.py", "say_scale.py"])
def test_code_that_is_edited_meanwhile_is_an_error_before_the_next_run(folder, monkeypatch, edited):
    """Each run reads the recipe again: those after the edit had other settings, and were averaged with those before it."""
    recipe = folder / "recipe.py"
    recipe.write_text(recipe.read_text().replace("reward=reward", 'reward="score.py:reward"'))
    (folder / "score.py").write_text("from say_scale import SCALE\n\n\ndef reward(text, task):\n    return SCALE\n")
    (folder / "say_scale.py").write_text("SCALE = 1.0\n")
    monkeypatch.delitem(sys.modules, "say_scale", raising=False)  # that of another case
    launched = []

    def launch(arguments):
        launched.append(arguments[0])
        path = folder / edited
        path.write_text(path.read_text() + "# edited\n")
        return 0 if len(launched) < 3 else 1

    monkeypatch.setattr("vlmrl.run.reproduction.launch_process", launch)
    with pytest.raises(SystemExit, match=rf"{re.escape(edited)} has changed since the start"):
        reproduce(monkeypatch, "--seeds", "0", "1")
    assert launched == ["train"]
