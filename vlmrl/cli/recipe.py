"""Loading a recipe, and how a command reports errors and interrupts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vlmrl.config import Config
from vlmrl.config.code import load_object

RecipePath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]


@dataclass(frozen=True)
class Recipe:
    """A Python file with a function ``config() -> Config``. Relative paths are looked up in ``folder`` first."""

    config: Callable[[], Config]
    folder: Path
    description: str

    @classmethod
    def load(cls, path: str) -> Recipe:
        """Raises ValueError if the file does not exist, cannot be imported or has no ``config``."""
        return cls.of(load_object(f"{path}:config"))

    @classmethod
    def of(cls, config: Callable[[], Config]) -> Recipe:
        return cls(config, Path(inspect.getfile(config)).resolve().parent, inspect.getmodule(config).__doc__ or "")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print errors of the user, the engine or the machine in one line instead of a traceback, and exit with status 1."""
    try:
        yield
    except Exception as error:
        from vlmrl.cluster import ClusterError
        from vlmrl.engine.base import EngineError
        from vlmrl.rollout.runner import RolloutError

        if not isinstance(error, ValueError | RolloutError | EngineError | ClusterError | OSError):
            raise
        print(f"vlmrl: {error}", file=sys.stderr)
        raise SystemExit(1) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Exit with status 130 and one line on Ctrl-C or at the end of the keyboard input."""
    try:
        yield
    except (KeyboardInterrupt, EOFError):
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None
