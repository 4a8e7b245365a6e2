"""Mistakes in a recipe or on the command line are one line, which says where; errors in vlmrl keep their traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from subprocess import PIPE

import pytest
from PIL import Image
from testing.episodes import a_task, play

from vlmrl.cli import main as cli
from vlmrl.cli.recipe import Recipe, errors_in_one_line
from vlmrl.config.fields import positive
from vlmrl.env.base import resolve_env

RECIPE = """
import vlmrl
from vlmrl import Config, Data, Env, Rollout, Train, obs

class Ask(Env):
    tools = {tools}
    def step(self, response_text):
        return obs(), True, {{"reward": 1.0}}

def tasks(index, seed):
    return {{"prompt": "Ask", "answer": "a"}}

def config():
    return {config}
"""
WHOLE = 'Config(data=Data(generator=tasks, size=8), env=Ask, output_dir="runs")'


def dry_run(monkeypatch, tmp_path, config=WHOLE, tools="[]", options=()):
    (tmp_path / "mine.py").write_text(RECIPE.format(config=config, tools=tools))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vlmrl", "train", "mine.py", "--dry-run", *options])
    cli.main()


def said(monkeypatch, capsys, tmp_path, **changed):
    with pytest.raises(SystemExit, match="1"):
        dry_run(monkeypatch, tmp_path, **changed)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("vlmrl: ")
    return error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Config(trian=Train())", "the config has no setting 'trian'. Perhaps you meant 'train'. ("),
        ("Config(train=Train(steps='five'))", "train.steps must be of the type int, but it is 'five'. ("),
        ("Config(name=nowhere)", "config() raised NameError: name 'nowhere' is not defined ("),
        ("dict(name='x')", "mine.py: config() must return a vlmrl.Config, but it returned {'name': 'x'}."),
    ],
)
def test_a_mistake_in_the_recipe_names_its_line(monkeypatch, capsys, tmp_path, config, message):
    error = said(monkeypatch, capsys, tmp_path, config=config)
    assert message in error
    assert "mine.py, line 14, in config)" in error or "must return" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "../evil"], "name must be a plain folder name, but it is '../evil'."),
        (["--model.path", "./nowhere"], "model.path './nowhere' does not exist. Looked at: "),
        (["--model.path", "nope/"], "model.path 'nope/' does not exist. Looked at: "),
        (["--model.path", "runs/x/model"], "model.path 'runs/x/model' does not exist. Looked at: "),
        (["--model.path", "run/config.json"], "must be the folder of a model in Hugging Face form, but "),
        (["--model.path", "step000005"], "a checkpoint of a run. Make a model of it first: vlmrl export "),
        (["--model.path", "run"], "is the folder of a run. Its model is "),
    ],
)
def test_a_mistake_on_the_command_line(monkeypatch, capsys, tmp_path, options, message):
    (tmp_path / "step000005/trainer").mkdir(parents=True)
    (tmp_path / "step000005/run.json").write_text("{}")
    (tmp_path / "run/model").mkdir(parents=True)
    for file in ("config.json", "model/config.json"):
        (tmp_path / "run" / file).write_text(json.dumps({"name": "x"}))
    assert message in said(monkeypatch, capsys, tmp_path, options=options)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[{}]", "env Ask: tools[0]'s name must be letters, digits, '_', '-' and '.', but it is None."),
        (
            "[max]",
            "env Ask: tools[0] must be a JSON schema (put Python functions into `functions` of a ToolEnv), but",
        ),
        ("'zoom'", "env Ask: tools must be a list of JSON schemas, but it is 'zoom'."),
        (
            "[{'name': 'a', 'parameters': {'type': 'objekt'}}]",
            "the parameters of tool 'a'['type'] are not a valid JSON schema",
        ),
        ("[{'name': 'a'}, {'name': 'a'}]", "env Ask: tools[1]'s name must be used once, but it is 'a'."),
        ("[{'name': 'a', 'parameters': {'type': 'string'}}]", "['type'] must be object"),
    ],
)
def test_a_tool_that_no_model_could_call(monkeypatch, capsys, tmp_path, tools, message):
    assert message in said(monkeypatch, capsys, tmp_path, tools=tools)


def test_the_file_beside_a_recipe_is_imported(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/helper_of_a_recipe.py").write_text("NAME = 'helped'\n")
    (tmp_path / "folder/mine.py").write_text(
        "import helper_of_a_recipe\nfrom vlmrl import Config\ndef config(): return Config(name=helper_of_a_recipe.NAME)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert Recipe.load("folder/mine.py").config().name == "helped"


def test_an_error_of_vlmrl_keeps_its_traceback():
    with pytest.raises(AttributeError), errors_in_one_line():
        positive("train", None, "steps")


def test_an_error_of_the_users_code_is_one_line(capsys):
    with pytest.raises(SystemExit), errors_in_one_line():
        raise KeyError("level")
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: KeyError: 'level' (") and "test_mistakes.py, line " in error


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_command_without_a_message():
    program = "from vlmrl.cli.recipe import errors_in_one_line\nwith errors_in_one_line():\n  while True: print('line')"
    with subprocess.Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_broken_pipe_elsewhere_is_reported(capsys):
    with pytest.raises(SystemExit), errors_in_one_line():
        raise BrokenPipeError("of a server")
    assert "of a server" in capsys.readouterr().err


def word(text, task):
    return "1"


def test_a_reward_functions_answer_is_a_number():
    spec = resolve_env(None, word, {})
    with pytest.raises(ValueError, match="the reward function word must return a finite number, but it returned '1'"):
        play(spec, ["a"], a_task())


def test_ctrl_c_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_, errors_in_one_line():
        raise KeyboardInterrupt
    assert exit_.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


def test_a_recipe_is_a_python_file():
    with pytest.raises(ValueError, match=r"RECIPE must be a Python file, which ends in \.py, but it is '\.'"):
        Recipe.load(".")


def test_the_plan_warns_of_empty_answers_and_a_long_warmup(monkeypatch, capsys, tmp_path):
    rows = [{"prompt": "Ask", "answer": answer} for answer in ("a", "")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--train.steps", "2", "--optim.warmup-steps", "3"]
    dry_run(monkeypatch, tmp_path, 'Config(data=Data("rows.jsonl"), env=Ask)', options=options)
    printed = capsys.readouterr().out
    assert "warning   column 'answer' is empty in row 1: any response contains the answer" in printed
    assert "warmup    3 steps of 2 (optim.warmup_steps): optim.lr is never reached" in printed


TWO_MARKS = {"prompt": "<image> or <image>?", "images": ["red.png"], "answer": "a"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (TWO_MARKS, [], "<image>"),
        (TWO_MARKS | {"images": ["none.png"]}, [], "none.png"),
        (
            {"prompt": "Ask", "answer": "a"},
            ["--rollout.max-tokens", "2", "--rollout.max-response-tokens", "1"],
            "tokens or more, and rollout.max_tokens is 2. `vlmrl data",
        ),
    ],
)
def test_a_dry_run_finds_broken_data(monkeypatch, capsys, tmp_path, row, options, message):
    Image.new("RGB", (32, 32)).save(tmp_path / "red.png")
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    error = said(monkeypatch, capsys, tmp_path, config='Config(data=Data("rows.jsonl"), env=Ask)', options=options)
    assert "the first tasks cannot be played: " in error and message in error


@pytest.mark.parametrize(
    "data",
    [
        'generator=lambda index, seed: vlmrl.Task("t", [])',  # the env's reset gives the prompt
        'generator=lambda index, seed: {"prompt": "Ask " * 60}, max_prompt_tokens=30',  # a run leaves it out
    ],
)
def test_a_dry_run_passes_what_a_run_passes(monkeypatch, capsys, tmp_path, data):
    settings = f"Config(data=Data({data}, size=3), rollout=Rollout(max_tokens=64, max_response_tokens=8), env=Ask)"
    dry_run(monkeypatch, tmp_path, settings)
    assert "warning" not in capsys.readouterr().out


def test_a_dry_run_warns_of_one_broken_row(monkeypatch, capsys, tmp_path):
    rows = [{"prompt": "Ask", "images": images} for images in ([], ["red.png"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dry_run(monkeypatch, tmp_path, 'Config(data=Data("rows.jsonl"), env=Ask)')
    assert re.search(r"warning   row 1 .*red\.png", capsys.readouterr().out)
