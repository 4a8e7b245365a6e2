"""`vlmrl init`: write a folder with a runnable recipe, an env or an agent, its test and data."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

STARTERS = Path(__file__).parent / "starter"


@dataclass(frozen=True)
class InitCommand:
    """Write a recipe, an env, its test and data into a folder: a run that learns on a CPU, to adapt to your own task."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder to write to, made if it is missing. Existing files are not overwritten."""
    kind: Literal["vlm", "text", "tool", "agent", "page"] = "vlm"
    """What the run trains.
    `vlm`: an env with images and text.
    `text`: an env with text only.
    `tool`: an env with a tool that returns an image.
    `agent`: an agent of your own that calls an OpenAI-compatible endpoint.
    `page`: a web page in Chromium, with mouse clicks."""

    def run(self, options: Sequence[str]) -> None:
        for path in write_starter(self.folder, self.kind):
            print(f"wrote     {path}")
        recipe = self.folder / "recipe.py"
        print(f"try it    vlmrl data check {recipe}")
        print(f"          vlmrl train {recipe}")
        has_pytest = importlib.util.find_spec("pytest") is not None
        print(f"          {'' if has_pytest else 'pip install pytest && '}python -m pytest {self.folder}")


def write_starter(folder: Path, kind: str) -> list[Path]:
    """Copy the starter of this kind into ``folder``. Returns what was written: files, and folders of images.

    Raises:
        ValueError: a file of the starter exists in ``folder`` already; nothing is written.
        OutputError: ``folder`` cannot be written to.
    """
    sources = sorted((STARTERS / kind).iterdir())
    targets = [folder / source.name.removesuffix(".txt") for source in sources]
    taken = [str(target) for target in targets if os.path.lexists(target)]
    from vlmrl.utils.output_files import output_errors

    if folder.is_file():
        raise ValueError(f"DIR must be a folder, but {folder} is a file: name another.")
    if taken:
        raise ValueError(f"{', '.join(taken)} exist already, and vlmrl init overwrites nothing: name another folder.")
    with output_errors(folder, "DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for source, target in zip(sources, targets, strict=True):
                _copy(source, target)
        except BaseException:  # half of a starter would be in the way of the next try
            for target in targets:
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            raise
    return targets


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder. `shutil.copytree` would hide that the disk is full."""
    if source.is_file():
        shutil.copyfile(source, target)
        return
    target.mkdir()
    for each in source.iterdir():
        _copy(each, target / each.name)
