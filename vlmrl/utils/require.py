"""Checks that raise ValueError with what to do: of a value, and of an optional package."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises ValueError unless ``ok``: the setting ``name`` must be ``rule``."""
    if not ok:
        raise ValueError(f"{name} must be {rule}, but it is {value!r}.")


def import_extra(package: str, extra: str) -> ModuleType:
    """Import an optional package. Raises ValueError with the extra of vlmrl that installs it if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{package} is not installed ({error}). Install it with pip install 'vlmrl[{extra}]'."
        ) from error
