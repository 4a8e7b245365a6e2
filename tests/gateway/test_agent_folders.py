"""The working folders of agents' commands are deleted, and nothing outside of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from testing.episodes import a_task

from vlmrl.config import Gateway
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agents import AgentError, Agents, AgentSpec
from vlmrl.utils import command_guard

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="mounts and signals of Linux")]
IN_A_NAMESPACE = ["unshare", "--mount", "--map-root-user"]  # whose mounts end with it


def deleting(folder: str) -> str:
    """A program that deletes a folder as the run does."""
    return f"import os, pathlib, runpy, tempfile; delete_all = runpy.run_path({command_guard.__file__!r})['delete_all']; {folder}"


def test_what_a_command_has_mounted_is_not_deleted(tmp_path: Path):
    if subprocess.run([*IN_A_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    data, folder = tmp_path / "data", tmp_path / "a folder"
    (folder / "m").mkdir(parents=True)
    data.mkdir()
    (data / "kept").write_text("x")
    program = deleting(f"delete_all(pathlib.Path({str(folder)!r}))")
    script = f"mount --bind '{data}' '{folder}/m' && exec {sys.executable} -c \"$1\""
    run = subprocess.run(
        [*IN_A_NAMESPACE, "sh", "-c", script, "sh", program], check=True, capture_output=True, text=True
    )
    assert (data / "kept").exists() and folder.exists() and "is a mount" in run.stderr
    command_guard.delete_all(folder)
    assert (data / "kept").exists() and not folder.exists()


def test_folders_without_the_right_to_write_are_deleted():
    program = deleting("""
if os.getuid() == 0:
    os.setuid(65534)  # root may write everywhere
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "modules").mkdir()
(folder / "modules/go.mod").touch()
(folder / "modules").chmod(0o555)
delete_all(folder)
assert not folder.exists()
""")
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


def test_a_command_that_stops_its_parent_is_ended_at_its_deadline(tmp_path: Path):
    command = ("sh", "-c", f"kill -STOP $PPID; touch {tmp_path / 'stopped'}; sleep 3600")
    made = Agents(AgentSpec("a", command=command), Gateway(agent_timeout=0.5), tmp_path / "logs")
    try:
        while not (tmp_path / "stopped").exists():  # the deadline of a slow machine may come before
            with pytest.raises(AgentError, match=r"no end within gateway\.agent_timeout"):
                asyncio.run(made.run(a_task(), AgentClient("http://127.0.0.1:9/t/x", "k"), "g/00"))
    finally:
        made.close()
