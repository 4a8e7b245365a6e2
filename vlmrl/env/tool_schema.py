"""Checks the arguments of a tool call against the tool's JSON schema.

Both sides are untrusted: a model writes the arguments, and a server may have written the schema. A check opens no address and no
file. Where it might take long, as with a regular expression, it runs in a process whose CPU time and memory are limited.
"""

from __future__ import annotations

import json
import re
from typing import Any

from vlmrl.env import schema_check
from vlmrl.utils.bounded import BoundedFunction, LimitError
from vlmrl.utils.require import require

COSTLY = tuple(f'"{key}' for key in ("$ref", "$dynamicRef", "$recursiveRef", "pattern", "uniqueItems", "unevaluated"))
"""The work of all other keywords is at most the schema's size times the arguments'."""
MAX_WORK = 1_000_000  # characters of JSON times characters of JSON: 50 ms
MAX_SCHEMAS = 5000  # characters of the parameters of all tools: values of a list are compared with each other, 0.2 s
CPU_SECONDS = 2.0  # of a check that may be longer
SCHEMA_SECONDS = 10.0  # of CPU for the schemas of all tools; a thousand ordinary ones take 3
_bounded_check = BoundedFunction(f"{schema_check.__file__}:schema_errors", cpu_seconds=CPU_SECONDS)
_bounded_schemas = BoundedFunction(f"{schema_check.__file__}:wrong_schema", cpu_seconds=SCHEMA_SECONDS)


def check_arguments(name: str, arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """Why ``arguments`` violate the ``schema`` of the tool ``name``, or ``""``.

    Arguments that the schema does not declare are refused, unless it says otherwise. ``null`` is allowed for one that is ``nullable``.
    A schema that needs another document, or a pattern that Python cannot read, allows any value: the tool must check it.

    Raises:
        RuntimeError: the schema itself is wrong, such as an unknown type.
    """
    text = json.dumps(schema)
    is_cheap = len(text) * len(json.dumps(arguments)) <= MAX_WORK and not any(key in text for key in COSTLY)
    try:
        found = (schema_check.schema_errors if is_cheap else _bounded_check)(arguments, schema)
    except LimitError:
        found = {"problem": "arguments: they are too large or nested too deeply to be checked"}
    if "wrong" in found:
        raise RuntimeError(f"tool {name}: its JSON schema is wrong: {found['wrong']}")
    return f"{name}: {found['problem']}." if found["problem"] else ""


def check_tools(tools: Any, where: str) -> None:
    """Raises ValueError unless ``tools`` is a list of JSON schemas with distinct names, as chat templates read them.

    ``[{"type": "function", "function": {"name": "zoom", "description": "...", "parameters": {"type": "object", ...}}}]``.
    ``where`` names their owner in the message.
    """
    require(isinstance(tools, list), f"{where}: tools", "a list of JSON schemas", tools)
    parameters: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        name = f"{where}: tools[{number}]"
        require(
            isinstance(tool, dict),
            name,
            "a JSON schema (put Python functions into `functions` of a ToolEnv)",
            tool,
        )
        function = tool.get("function", tool)
        require(isinstance(function, dict), f"{name}['function']", "a dict", function)
        own = function.get("name")
        valid = isinstance(own, str) and re.fullmatch(r"[\w.-]+", own) is not None
        require(valid, f"{name}'s name", "letters, digits, '_', '-' and '.'", own)
        require(own not in parameters, f"{name}'s name", "used once", own)
        parameters[own] = function.get("parameters", {})
        require(
            isinstance(parameters[own], dict),
            f"{where}: the parameters of tool {own!r}",
            "a JSON schema",
            parameters[own],
        )
    _check_parameters(parameters, where)


def _check_parameters(parameters: dict[str, dict[str, Any]], where: str) -> None:
    """Raises ValueError unless each tool's parameters are a JSON schema of an object."""
    text = json.dumps(parameters, default=repr)
    is_cheap = len(text) <= MAX_SCHEMAS and '"pattern' not in text
    try:
        wrong = (schema_check.wrong_schema if is_cheap else _bounded_schemas)(json.loads(text))
    except LimitError as error:
        raise ValueError(f"{where}: the parameters of its tools are too large to be checked.") from error
    if wrong:
        own, place, reason = wrong
        raise ValueError(f"{where}: the parameters of tool {own!r}{place} are not a valid JSON schema: {reason}.")
    for own, schema in parameters.items():
        kind, name = schema.get("type", "object"), f"{where}: the parameters of tool {own!r}['type']"
        require(kind == "object", name, "object, since a call has named arguments", kind)
