"""Where in the user's own code an error was raised."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_OURS = str(Path(__file__).parents[1])
_INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name != "data"})
_PACKAGES = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class UsersLine:
    """A line of the user's own code that an error went through. ``calls_vlmrl``: vlmrl, called there, raised it."""

    file: str
    line: int
    function: str
    calls_vlmrl: bool

    def __str__(self) -> str:
        return f"{_shown(self.file)}, line {self.line}, in {self.function}"


def users_line(error: BaseException | None) -> UsersLine | None:
    """The innermost line outside of vlmrl and of installed packages that raised ``error``, or one of its causes."""
    while error is not None:
        calls_vlmrl = False
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith(_OURS):
                calls_vlmrl = True
            elif not frame.filename.startswith(("<", *_INSTALLED)) and not _PACKAGES & set(Path(frame.filename).parts):
                return UsersLine(frame.filename, frame.lineno or 0, frame.name, calls_vlmrl)
        error = error.__cause__
    return None


def describe_error(error: BaseException) -> str:
    """The error and the user's line that raised it: ``"KeyError: 'level' (env.py, line 21, in step)"``."""
    place = users_line(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def _shown(file: str) -> str:
    """The path from the working directory, if the file is in it."""
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file
