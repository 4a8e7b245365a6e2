"""The guide's file and commands, as they stand, from an empty folder."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from vlmrl.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs/your_own_environment.md").read_text()
COMMANDS = re.findall(r"^```\n(vlmrl .*)\n```$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# dots\.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "dots.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, monkeypatch, capsys, typed=""):
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    cli.main()
    return capsys.readouterr().out


def test_the_guide_shows_three_commands():
    assert [command.split()[1] for command in COMMANDS] == ["play", "data", "train"]


def test_it_is_played_by_hand(folder, monkeypatch, capsys):
    output = run(COMMANDS[0], monkeypatch, capsys, typed="77\n78\n")
    assert "How many dots are there?" in output and "Not right. These are the upper ones:" in output
    assert output.count("image 0:") == output.count("image 1:") == 1
    assert "1 episode, mean reward 0.000" in output


def test_it_is_shown_as_the_model_sees_it(folder, monkeypatch, capsys):
    output = run(COMMANDS[1], monkeypatch, capsys)
    assert "1920 tasks to train on, 128 held out" in output and "64x64 px" in output


@pytest.mark.slow
@pytest.mark.long
def test_it_trains_and_leaves_what_is_promised(folder, monkeypatch, capsys):
    output = run(COMMANDS[2], monkeypatch, capsys)
    assert "Dots, at most 2 turns" in output and "1920 tasks, 128 held out" in output
    promised = re.findall(r"`([\w./]+)`", PAGE[PAGE.index("| file | content |") : PAGE.index("## When something")])
    assert {"trajectories.html", "summary.json"} <= set(promised)
    for name in promised:
        assert (folder / "runs/dots" / name).exists(), name
    summary = json.loads((folder / "runs/dots/summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.1, "the guide promises a reward that rises"
