"""Folders that are written atomically, the package's cache folder, and that of torch's compiler."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "VLMRL_CACHE"
"""The environment variable that moves the cache from ``~/.cache/vlmrl``."""


def cache_root() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/vlmrl").expanduser()


def working_directory() -> str:
    """The working directory, or ``(deleted)``: an env may have changed to a temporary one."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(deleted)"


def check_compiled_code() -> None:
    """Raises ValueError if another user owns the folder whose code torch's compiler runs, here or in a server program.

    It is ``torchinductor_NAME`` in the temporary folder, where any user of the machine can make it first. torch writes and reads
    precompiled headers there also if ``TORCHINDUCTOR_CACHE_DIR`` names another folder.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    folder = Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))  # torch's own choice
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)  # once it is ours, nobody else can put another in its place
    if folder.lstat().st_uid != os.getuid() or folder.stat().st_uid != os.getuid():
        raise ValueError(
            f"the folder {folder}, from which torch's compiler runs code, belongs to another user: set the environment variable "
            "TMPDIR to a folder of your own."
        )


def build_folder(folder: Path, build: Callable[[Path], object]) -> Path:
    """``folder``, filled by ``build(path)`` unless it exists already.

    ``path`` is an empty temporary folder of the same name. When ``build`` returns, it is moved to ``folder``. Processes that start
    together may all build; the first to finish wins, and the others use its result.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        built = Path(scratch) / folder.name
        built.mkdir()
        build(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder
