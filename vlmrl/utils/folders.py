"""Folders that are written atomically, and the package's cache folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE_VARIABLE = "VLMRL_CACHE"
"""The environment variable that moves the cache from ``~/.cache/vlmrl``."""


def cache_root() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/vlmrl").expanduser()


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
