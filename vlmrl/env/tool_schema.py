"""Checks the arguments of a tool call against the tool's JSON schema.

Both sides are untrusted: a model writes the arguments, and a server may have written the schema. A check opens no address and no
file. Where it might take long, as with a regular expression, it runs in a process whose CPU time and memory are limited.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from vlmrl.env import schema_check
from vlmrl.utils.bounded import BoundedFunction, LimitError
from vlmrl.utils.require import require

COSTLY = tuple(f'"{key}' for key in ("$ref", "$dynamicRef", "$recursiveRef", "pattern", "uniqueItems", "unevaluated"))
"""The work of all other keywords is at most the schema's size times the arguments'."""
MAX_WORK = 1_000_000  # characters of JSON times characters of JSON: 50 ms
CPU_SECONDS = 2.0  # of a check that may be longer
_bounded_check = BoundedFunction(f"{schema_check.__file__}:schema_errors", cpu_seconds=CPU_SECONDS)


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
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        name = f"{where}: tools[{number}]"
        require(isinstance(tool, dict), name, "a dict", tool)
        function = tool.get("function", tool)
        require(isinstance(function, dict), f"{name}['function']", "a dict", function)
        own = function.get("name")
        valid = isinstance(own, str) and re.fullmatch(r"[\w.-]+", own) is not None
        require(valid, f"{name}'s name", "letters, digits, '_', '-' and '.'", own)
        require(own not in seen, f"{name}'s name", "used once", own)
        seen.add(own)
        _check_parameters(f"{where}: the parameters of tool {own!r}", function.get("parameters", {}))


def _check_parameters(name: str, parameters: Any) -> None:
    require(isinstance(parameters, dict), name, "a JSON schema", parameters)
    try:
        jsonschema.validators.validator_for(parameters, jsonschema.Draft202012Validator).check_schema(parameters)
    except jsonschema.SchemaError as error:
        place = "".join(f"[{key!r}]" for key in error.absolute_path)
        raise ValueError(f"{name}{place} are not a valid JSON schema: {error.message[:300]}.") from error
    kind = parameters.get("type", "object")
    require(kind == "object", f"{name}['type']", "object, since a call has named arguments", kind)
