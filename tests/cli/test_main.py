"""The `vlmrl` command: subcommands, the recipe before its options, one-line errors."""

from __future__ import annotations

import re
import sys

import pytest

import vlmrl
from vlmrl.cli import main as cli


def vlmrl_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vlmrl", *arguments])
    cli.main()


@pytest.mark.parametrize(
    ("word", "said"),
    [("trian", "'trian'; perhaps you meant 'train'. For full"), ("zzz", "'zzz'; there are train, sft, ")],
)
def test_an_unknown_command_is_one_line(monkeypatch, capsys, word, said):
    with pytest.raises(SystemExit, match="2"):
        vlmrl_command(monkeypatch, word, "recipe.py")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vlmrl: there is no command {said}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("eval", "Evaluate models on the held-out tasks of a recipe."),
        ("play", "--data.generator file.py:tasks` plays an agent."),
    ],
)
def test_the_help_of_a_recipe_says_what_the_command_does(command, said, monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text('"""Count."""\nfrom vlmrl import Config\ndef config(): return Config()\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        vlmrl_command(monkeypatch, command, "mine.py", "--help")
    assert f"{said}\n\nCount." in capsys.readouterr().out


def test_the_description_of_a_recipe_fits_the_terminal_and_keeps_its_commands(monkeypatch, capsys, tmp_path):
    code = "    python mine.py      # a comment that is wider than this terminal: not wrapped"
    (tmp_path / "mine.py").write_text(
        f'"""Count.\n\n{code}\n\n{"It counts. " * 20}"""\nfrom vlmrl import Config\ndef config(): return Config()\n'
    )
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit, match="0"):
        vlmrl_command(monkeypatch, "train", str(tmp_path / "mine.py"), "--help")
    shown = capsys.readouterr().out.splitlines()
    text = [line for line in shown if "counts." in line]
    assert code in shown and len(text) == 4 and max(map(len, text)) <= 60


def test_a_missing_file_names_its_neighbours(monkeypatch, capsys, tmp_path):
    (tmp_path / "recipe.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "train", "recpie.py")
    assert capsys.readouterr().err.endswith("recpie.py. Close names there: recipe.py\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train recipe.py --optim.lr 1", 2),
        ("eval recipe.py --help", 2),
        ("reproduce recipe.py --seeds 0 1", 2),
        ("plan recipe.py --gpu h100-80gb", 2),
        ("data check recipe.py --rows 3", 3),
        ("train --help", 2),
        ("data check --help", 3),
        ("play mine.py:Ask --data.generator mine.py:tasks", 2),
        ("play recipe.py --by-hand", 2),
        ("play --agent mine.py:run", 1),
        ("env serve mine.py:Ask --port 1", 5),
    ],
)
def test_a_recipes_options_are_split_off(arguments, words):
    parts = arguments.split()
    assert cli.split_at_recipe(parts) == (parts[:words], parts[words:])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_help_lists_all_commands(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit, match="0"):
        vlmrl_command(monkeypatch, *arguments)
    shown = capsys.readouterr().out
    assert all(f"• {name} " in shown for name in cli.COMMANDS)
    assert "--dry-run" not in shown  # an option is for the help of its command


def test_the_help_of_view_asks_for_a_run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        vlmrl_command(monkeypatch, "view", "--help")
    assert "RUN [RUN ...]" in (shown := capsys.readouterr().out) and "are compared. (required)" in shown


def test_the_version_is_printed(monkeypatch, capsys):
    vlmrl_command(monkeypatch, "--version")
    assert capsys.readouterr().out == f"{vlmrl.__version__}\n"


def test_the_help_of_train_lists_the_settings_of_the_recipe(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(
        '"""My recipe."""\nfrom vlmrl import Config\ndef config(): return Config(name="mine")\n'
    )
    with pytest.raises(SystemExit, match="0"):
        vlmrl_command(monkeypatch, "train", str(tmp_path / "mine.py"), "--help")
    shown = capsys.readouterr().out
    assert "My recipe." in shown and "(default: mine)" in shown and "--optim.lr FLOAT" in shown


def test_a_missing_recipe_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "train", "gone.py")
    error = capsys.readouterr().err
    assert error.startswith("vlmrl: 'gone.py' does not exist. Looked at: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ("view run --bad", "vlmrl view"),
        ("init folder --bad", "vlmrl init"),
        ("env serve mine.py:Ask --bad", "vlmrl env serve"),
        ("data chek", "vlmrl data"),
        ("train", "vlmrl train"),
        ("env serve", "vlmrl env serve"),
        ("data check mine.py --bad", "vlmrl data check mine.py"),
        ("train mine.py --optim.lr much", "vlmrl train mine.py"),
        ("tain", "vlmrl"),
    ],
)
def test_a_wrong_option_points_to_the_help_of_its_command(monkeypatch, capsys, tmp_path, arguments, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text("from vlmrl import Config\ndef config(): return Config()\n")
    with pytest.raises(SystemExit, match="2"):
        vlmrl_command(monkeypatch, *arguments.split())
    error = capsys.readouterr().err
    assert re.search(rf"\b{program} --help\b", error) and "Traceback" not in error
