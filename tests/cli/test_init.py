"""`vlmrl init` writes a folder whose test passes and that trains at once."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testing.browser import need_chromium

from vlmrl.cli import init
from vlmrl.cli import main as cli
from vlmrl.utils.output_files import OutputError

SHORT = ["--warm-start.steps", "2", "--warm-start.trajectories-per-step", "4", "--data.held-out", "4"]
SHORT += [
    "--train.steps",
    "1",
    "--train.groups-per-batch",
    "2",
    "--rollout.group-size",
    "2",
    "--rollout.truncated-reward",
    "0",
]


def vlmrl_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["vlmrl", *words])
    cli.main()


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path, request):
    """The commands that are printed for a kind, in the folder where they are to be run."""
    monkeypatch.chdir(tmp_path)
    vlmrl_command(monkeypatch, "init", "mine", "--kind", request.param)
    lines = capsys.readouterr().out.splitlines()
    commands = [line[10:].split() for line in lines if not line.startswith("wrote")]
    assert [command[:3] for command in commands] == [
        ["vlmrl", "data", "check"],
        ["vlmrl", "train", "mine/recipe.py"],
        ["python", "-m", "pytest"],
    ]
    return commands


@pytest.mark.slow
@pytest.mark.parametrize("printed", ["vlm", "text", "tool", "agent", "page"], indirect=True)
def test_what_it_prints_runs(printed, request, monkeypatch, tmp_path):
    if request.node.callspec.params["printed"] == "page":
        need_chromium()
    check, train, test = printed
    done = subprocess.run([sys.executable, *test[1:]], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    vlmrl_command(monkeypatch, *check[1:])
    vlmrl_command(monkeypatch, *train[1:], *SHORT)
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert {"reward_before", "reward_after"} <= json.loads(summary.read_text()).keys()


def test_the_images_that_the_vlm_starter_holds_out_are_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vlmrl_command(monkeypatch, "init", ".")
    rows = [json.loads(line) for line in Path("data.jsonl").read_text().splitlines()]
    images = {Path(row["images"][0]).read_bytes() for row in rows}
    assert len(rows) == len(images) == 180 and "held_out=60" in Path("recipe.py").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_the_text_starter_learns(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    vlmrl_command(monkeypatch, "init", ".", "--kind", "text")
    vlmrl_command(monkeypatch, "train", "recipe.py", "--no-save-model", "--train.steps", "12")
    summary = json.loads((tmp_path / "runs/text/summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.15  # 0.36 where it was written


def test_a_folder_that_cannot_be_made_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "init", str(tmp_path / "file/mine"))
    assert "set DIR to another" in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "init", str(tmp_path / "file"))
    assert "DIR must be a folder, but" in capsys.readouterr().err


def test_without_pytest_it_says_how_to_install_it(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pytest" else find(name, *more)
    )
    vlmrl_command(monkeypatch, "init", str(tmp_path / "mine"))
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("wrote")]
    assert lines[0].startswith("try it    vlmrl data check") and "pip install pytest && python -m pytest" in lines[-1]


def test_nothing_is_overwritten(monkeypatch, capsys, tmp_path):
    (tmp_path / "env.py").write_text("mine")
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "init", str(tmp_path))
    assert "env.py exist already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["env.py"] and (tmp_path / "env.py").read_text() == "mine"


def test_nothing_is_written_through_a_link(monkeypatch, capsys, tmp_path):
    """Also through one whose target does not exist yet."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/env.py").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="1"):
        vlmrl_command(monkeypatch, "init", str(tmp_path / "mine"))
    assert "env.py exist already" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists() and len(list((tmp_path / "mine").iterdir())) == 1


def test_a_full_disk_leaves_no_half_of_a_starter(monkeypatch, tmp_path):
    copy = init.shutil.copyfile

    def full(source, target, **options):
        copy(source, target, **options)
        if Path(target).name == "recipe.py":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(init.shutil, "copyfile", full)
        with pytest.raises(OutputError, match="No space left"):
            init.write_starter(tmp_path / "own", "vlm")
    assert not list((tmp_path / "own").iterdir())
    assert init.write_starter(tmp_path / "own", "vlm")
