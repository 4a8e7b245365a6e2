"""Types of settings and rules for their values, shared by all sections of a config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

Options = dict[str, int | float | bool | None | str]  # noqa: RUF036  tyro tries the types in this order; str accepts any word


def name_of(code: object) -> str:
    """The name of a function, a class or a string of code, for messages."""
    return code if isinstance(code, str) else getattr(code, "__qualname__", str(code))


Code = Annotated[
    str | Callable[..., Any] | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE.py:NAME",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: value is None or isinstance(value, str) or callable(value),
        str_from_instance=lambda value: [name_of(value)],
    ),
]
"""A function or class, or the string that names it: ``module:name`` or ``file.py:name``."""


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises ValueError unless ``ok``: the setting ``name`` must be ``rule``."""
    if not ok:
        raise ValueError(f"{name} must be {rule}, but it is {value!r}.")


def positive(prefix: str, config: object, *names: str) -> None:
    """Raises ValueError unless these fields of ``config`` are ``None`` or finite and greater than 0."""
    for name in names:
        value = getattr(config, name)
        require(value is None or (math.isfinite(value) and value > 0), f"{prefix}.{name}", "greater than 0", value)
