"""Types of settings and rules for their values, shared by all sections of a config."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import re
import typing
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

import typeguard
from tyro.constructors import PrimitiveConstructorSpec

from vlmrl.config.option_names import named_elsewhere
from vlmrl.utils.require import require

_FLAGS = {"True": True, "true": True, "False": False, "false": False}
_Flag = Annotated[
    bool,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="{True,False}",
        instance_from_str=lambda words: _flag_of(words[0]),
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    ),
]
Options = dict[str, int | float | _Flag | None | str]  # noqa: RUF036  tyro tries the types in this order; str accepts any word

_PLAIN_OPTIONS = dict[str, int | float | bool | None | str]  # noqa: RUF036  as `typing.get_type_hints` gives them


def _flag_of(word: str) -> bool:
    """``_flag_of("false")`` is False; tyro's own reads ``False`` alone, and ``false`` would be a string, which counts as true."""
    if word not in _FLAGS:
        raise ValueError(f"neither True nor False: {word!r}")
    return _FLAGS[word]


def name_of(code: object) -> str:
    """The name of a function, a class or a string of code, for messages."""
    return code if isinstance(code, str) else getattr(code, "__qualname__", str(code))


def short_name(code: object) -> str:
    """The name without its file or module, for tables and metrics: ``half`` for ``/home/me/mine.py:half``."""
    return name_of(code).rpartition(":")[2]


def _code(metavar: str) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: None if words[0] == "None" else words[0],
        is_instance=lambda value: value is None or isinstance(value, str) or callable(value),
        str_from_instance=lambda value: [name_of(value)],
    )


Code = Annotated[str | Callable[..., Any] | None, _code("FILE.py:NAME")]
"""A function or class, or the string that names it: ``module:name`` or ``file.py:name``."""
Codes = Annotated[
    str | Callable[..., Any] | tuple[str | Callable[..., Any], ...] | dict[str | Callable[..., Any], float] | None,
    PrimitiveConstructorSpec(
        nargs="+",
        metavar="FILE.py:NAME [FILE.py:NAME ...]",
        instance_from_str=lambda words: _codes_of(words),
        is_instance=lambda value: value is None or isinstance(value, str | tuple | dict) or callable(value),
        str_from_instance=lambda value: (
            [name_of(code) for code in value] if isinstance(value, tuple | dict) else [name_of(value)]
        ),
    ),
]
"""One function as in :data:`Code`; or several, as a list, or as a dict with a weight for each."""
Named = Annotated[str | Callable[..., Any], _code("NAME|FILE.py:NAME")]
"""A built-in function by its name, or code as in :data:`Code`."""
NamedOrNone = Annotated[str | Callable[..., Any] | None, _code("NAME|FILE.py:NAME")]
"""As :data:`Named`, or unset."""


Agent = Annotated[str | Callable[..., Any] | None, _code("FILE.py:NAME|COMMAND")]
"""A function as in :data:`Code`, or a command line: see :func:`is_command`."""


def is_command(agent: object) -> TypeGuard[str]:
    """Whether an agent is a command line, and no function: ``python agent.py`` and ``./agent`` are, ``agent.py:play`` is none."""
    return isinstance(agent, str) and not re.fullmatch(r"(.*\.py|[\w.]+):[\w.]+", agent)


def _codes_of(words: list[str]) -> str | tuple[str, ...] | None:
    if len(words) > 1:
        return tuple(words)
    return None if words[0] == "None" else words[0]


def weights_of(codes: Any) -> dict[Any, float]:
    """The functions of a setting of the type :data:`Codes`, each with its weight: 1 unless a dict gives another."""
    if isinstance(codes, dict):
        return codes
    return dict.fromkeys(codes if isinstance(codes, tuple) else [codes], 1.0)


def positive(prefix: str, config: object, *names: str) -> None:
    """Raises ValueError unless these fields of ``config`` are ``None`` or greater than 0."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{prefix}.{name}", "greater than 0", value)


def perhaps(name: str, known: Iterable[str]) -> str:
    """`` Perhaps you meant 'steps'.``, or ``""`` if no ``known`` name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Perhaps you meant {close[0]!r}." if close else ""


class CheckedSettings(type):
    """The metaclass of :class:`Settings`: it checks and converts the values before the dataclass stores them."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        section, types = getattr(cls, "section", ""), _types_of(cls)
        if len(values) > len(types):
            raise ValueError(f"{cls.__name__} has {len(types)} settings, but {len(values)} values were given.")
        checked = {}
        for name, value in (dict(zip(types, values, strict=False)) | named).items():
            if name not in types:
                ours = named_elsewhere(name)
                hint = f" {ours}." if ours else perhaps(name, types)
                raise ValueError(f"{section or 'the config'} has no setting {name!r}.{hint}")
            full = f"{section}.{name}".lstrip(".")
            require(not isinstance(value, float) or math.isfinite(value), full, "a finite number", value)
            checked[name] = as_setting(full, value, types[name])
        return super().__call__(**checked)


class Settings(metaclass=CheckedSettings):
    """Base of all sections of a config. Names and types are checked when it is created, in Python as on the command line.

    ``Train(stps=5)`` raises ValueError: "train has no setting 'stps'. Perhaps you meant 'steps'."
    ``Train(steps="5")`` raises ValueError: "train.steps must be of the type int, but it is '5'."
    ``Rollout(stop=["</a>"])`` is taken as ``Rollout(stop=("</a>",))``.
    """

    section: ClassVar[str] = ""
    """Name of the section in the config, for messages. Empty: the whole config."""


@functools.cache
def _types_of(cls: Any) -> dict[str, Any]:
    """The type of each field of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def as_setting(name: str, value: object, expected: Any) -> object:
    """``value`` as :func:`_usual` gives it, of the type ``expected``. Raises ValueError as :func:`check_type`.

    Options from Python may have any values, as they are given to the user's own code.
    """
    usual = _usual(value)
    check_type(name, usual, dict[str, Any] if expected == _PLAIN_OPTIONS else expected)
    return usual


def _usual(value: Any) -> Any:
    """``value`` in the types that settings have: a list as a tuple, a number of NumPy as one of Python, a path as a str."""
    if type(value) in (list, tuple):
        return tuple(_usual(each) for each in value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return float(value)
    return value


def check_type(name: str, value: object, expected: Any) -> None:
    """Raises ValueError unless ``value``, of the setting ``name``, is of the type ``expected``. An int is a float, too."""
    every = typeguard.CollectionCheckStrategy.ALL_ITEMS
    try:
        typeguard.check_type(value, expected, collection_check_strategy=every)
    except typeguard.TypeCheckError:
        raise ValueError(f"{name} must be {_type_rule(expected)}, but it is {value!r}.") from None


def _type_rule(expected: Any) -> str:
    """A type for people: ``of the type tuple[str, ...]``, ``one of grpo, rloo``."""
    if typing.get_origin(expected) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(expected)))}"
    if expected in (typing.get_args(Code)[0], typing.get_args(Named)[0]):
        return "a function, a class or 'file.py:name'"
    plain = isinstance(expected, type) and not typing.get_args(expected)
    return f"of the type {expected.__name__ if plain else expected}"
