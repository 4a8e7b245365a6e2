"""Finds the line of the user's own code that raised an error, and releases what an error holds."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.utils.folders import working_directory

MOST_CHARACTERS = 10_000  # of an error's text, which a run keeps with its trajectory: it may quote what a server sent
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
            elif _is_users(frame.filename):
                return UsersLine(frame.filename, frame.lineno or 0, frame.name, calls_vlmrl)
        error = error.__cause__
    return None


def describe_error(error: BaseException) -> str:
    """The error and the user's line that raised it: ``"KeyError: 'level' (env.py, line 21, in step)"``."""
    place = users_line(error)
    return f"{type(error).__name__}: {text_of(error)}" + (f" ({place})" if place else "")


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the calls that raised an error and its causes. A future and its error refer to each other, and so to the
    calls: what those hold, such as an env or a request, would stay until Python looks for such circles, in any thread."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def text_of(error: BaseException) -> str:
    """The text of an error, also of one whose own ``__str__`` raises another; of a long one, its beginning and end."""
    try:
        text = str(error)
    except BaseException as second:  # it must not end the run in place of the error
        return f"its text cannot be had ({type(second).__name__})"
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def defined_at(function: Callable[..., Any]) -> str:
    """Where the user wrote ``function``: ``" (env.py, line 21, in step)"``. Nothing for one of vlmrl or of an installed package."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename.startswith(_OURS) or not _is_users(code.co_filename):
        return ""
    return f" ({_shown(code.co_filename)}, line {code.co_firstlineno}, in {code.co_name})"


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_INSTALLED)) and not _PACKAGES & set(Path(file).parts)


def _shown(file: str) -> str:
    """The path from the working directory, if the file is in it."""
    folder = working_directory()
    return str(Path(file).relative_to(folder)) if Path(file).is_relative_to(folder) else file
