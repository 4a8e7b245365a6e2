"""Checks that raise ValueError with what to do: of a value, and of an optional package."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

MOST_NUMBER = 1e15  # of a reward: sums of larger ones lose the small ones
MOST_METRIC = 1e100  # whose means are finite


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises ValueError unless ``ok``: the setting ``name`` must be ``rule``."""
    if not ok:
        raise ValueError(f"{name} must be {rule}, but it is {value!r}.")


def moderate_number(value: Any, name: str, most: float = MOST_NUMBER) -> float:
    """A reward or a metric from outside, as a float. Raises ValueError unless ``value`` is a number from ``-most`` to ``most``."""
    if isinstance(value, bool | int | float) and abs(value) <= most:  # NaN is not
        return float(value)
    raise ValueError(f"{name} must be a number from {-most:g} to {most:g}, but it is {value!r:.100}")


def import_extra(package: str, extra: str) -> ModuleType:
    """Import an optional package. Raises ValueError with the extra of vlmrl that installs it if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{package} is not installed ({error}). Install it with pip install 'vlmrl[{extra}]'."
        ) from error
