"""The arguments of a tool call as the function's type hints want them.

JSON has fewer types than Python, so an argument that fits the tool's schema may have another type than its hint: ``2.0`` is an integer
of a JSON schema, and an Enum is a list of values.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints


def hinted_arguments(functions: Sequence[Callable[..., Any]], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the function of this name, with whole floats that it hints as ``int`` and values of an Enum converted.

    Those inside of lists, tuples, dicts and unions are, too. What does not fit its hint stays as it is, and so does all of a call of a
    tool that is none of ``functions``, such as an MCP server's.
    """
    hints = next((get_type_hints(function) for function in functions if function.__name__ == name), {})
    return {key: _hinted(value, hints.get(key)) for key, value in arguments.items()}


def _hinted(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next((member for member in hint if member.value == value), value)
    if hint is int:
        return int(value) if isinstance(value, float) and value.is_integer() else value
    inner = get_args(hint)
    if isinstance(value, list) and get_origin(hint) in (list, tuple):
        is_fixed = get_origin(hint) is tuple and inner[-1] is not ...
        hints = inner if is_fixed else inner[:1] * len(value)
        return [_hinted(*pair) for pair in zip(value, hints, strict=False)] + value[len(hints) :]
    if isinstance(value, dict) and get_origin(hint) is dict:
        return {key: _hinted(item, inner[1]) for key, item in value.items()}
    if get_origin(hint) in (Union, types.UnionType) and float not in inner:
        return next((made for option in inner if (made := _hinted(value, option)) is not value), value)
    return value
