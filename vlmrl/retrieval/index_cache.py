"""Where indices are kept: made once, found again by what they were made from, whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = "VLMRL_CACHE"
"""The environment variable that moves the cache from ``~/.cache/vlmrl``."""


def cached_folder(kind: str, made_from: object, build: Callable[[Path], None]) -> Path:
    """The folder that ``build(folder)`` filled, now or in an earlier run; its name hashes ``repr(made_from)``.

    Processes that start together may build it twice; one of the two is kept.
    """
    root = Path(os.environ.get(ROOT) or "~/.cache/vlmrl").expanduser() / "retrieval"
    folder = root / f"{kind}-{hashlib.blake2b(repr(made_from).encode(), digest_size=8).hexdigest()}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{kind}-") as scratch:
        built = Path(scratch) / "index"
        built.mkdir()
        build(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    return folder
