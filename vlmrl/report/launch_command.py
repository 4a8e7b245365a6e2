"""Saves the command that started a run in its folder, and derives the command that resumes it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from vlmrl.utils.folders import working_directory
from vlmrl.utils.output_files import atomic_write

FILE = "command.txt"
NAME_OPTION = r" --name[ =]('[^']*'|\S+)"


def write_command(folder: Path, words: Sequence[str]) -> None:
    """Write the command line into the run's folder, for a shell: ``cd /home/me && vlmrl train recipe.py --optim.lr 1e-5``."""
    kept = [word for word in words if word != "--resume"]
    atomic_write(folder / FILE, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(_launched(kept))}\n")


def resume_command(folder: Path, name: str | None = None) -> str | None:
    """The command that continues the run of ``folder``, by its own ``name`` or another. None: it was not started by a command."""
    if not (folder / FILE).exists():
        return None
    command = (
        (folder / FILE).read_text(encoding="utf-8").strip().removeprefix(f"cd {shlex.quote(working_directory())} && ")
    )
    if name is not None:
        command = f"{re.sub(NAME_OPTION, '', command)} --name {shlex.quote(name)}"
    return f"{command} --resume"


def _launched(words: list[str]) -> list[str]:
    """The command line of this process, or that of the torchrun which started it."""
    nodes, ranks = os.environ.get("GROUP_WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or nodes is None or ranks is None:
        return words
    return ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", ranks, *as_program(words)]


def as_program(words: Sequence[str]) -> list[str]:
    """The arguments of Python that run a command line: ``vlmrl train a.py`` becomes ``-m vlmrl train a.py``."""
    return list(words[1:]) if words[0] == "python" else ["-m", *words]
