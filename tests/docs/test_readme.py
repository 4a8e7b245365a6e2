"""The README's env, recipe and commands, as they stand and in their order: the reward rises."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from vlmrl.cli import main as cli

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^vlmrl .*recipe\.py.*$", README.partition("Then, from anywhere:")[2], re.MULTILINE)


@pytest.mark.slow
def test_the_readmes_commands_teach_the_agent(tmp_path, monkeypatch, capsys):
    env, recipe, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "guess.py").write_text(env)
    (tmp_path / "recipe.py").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("red\n" * 20))
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
        cli.main()
    output = capsys.readouterr().out
    assert "4 episodes, mean reward 0.500" in output  # two of the first four are red
    assert "1920 of 1920 rows can be played" in output
    summary = json.loads((tmp_path / "runs/guess/summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.1, "the README promises a reward that rises"
