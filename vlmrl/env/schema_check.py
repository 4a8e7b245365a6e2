"""Checks a tool call's arguments. It imports nothing of vlmrl, since it may run in a separate process (`utils/bounded.py`)."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import referencing

COMPOSED = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
"""Keywords that can declare properties elsewhere than in ``properties``."""
NO_DOCUMENTS: referencing.Registry[Any] = referencing.Registry()  # jsonschema's own would open addresses


def violation(arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """Where and how ``arguments`` violate ``schema``, or ``""``: ``arguments.a: 'x' is not of type 'integer'``.

    Raises:
        RecursionError, OverflowError: the arguments are too deep, or a number is too large.
        Exception: of any other type if the schema is wrong.
    """
    closed = schema if COMPOSED & schema.keys() else {"additionalProperties": False, **schema}
    properties = schema.get("properties", {})
    nullable = [key for key, value in properties.items() if isinstance(value, dict) and value.get("nullable")]
    given = {key: value for key, value in arguments.items() if value is not None or key not in nullable}
    if nulls := arguments.keys() - given.keys():
        closed = {**closed, "required": [key for key in schema.get("required", []) if key not in nulls]}
    validator = jsonschema.validators.validator_for(closed, jsonschema.Draft202012Validator)
    try:
        error = jsonschema.exceptions.best_match(validator(closed, registry=NO_DOCUMENTS).iter_errors(given))
    except (referencing.exceptions.Unresolvable, re.error):
        return ""
    if error is None:
        return ""
    place = ".".join(map(str, ("arguments", *error.absolute_path)))
    return f"{place}: {error.message[:300]}"


def schema_errors(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, str]:
    """``problem``: as :func:`violation`; or ``wrong``: the error that the schema raises."""
    try:
        return {"problem": violation(arguments, schema)}
    except (RecursionError, OverflowError):
        return {"problem": "arguments: they are too large or nested too deeply to be checked"}
    except Exception as error:
        return {"wrong": f"{type(error).__name__}: {error}"}


def wrong_schema(schemas: dict[str, dict[str, Any]]) -> list[str]:
    """The name of the first one that is no JSON schema, the place, and why; empty if all are."""
    for name, schema in schemas.items():
        try:
            jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
        except jsonschema.SchemaError as error:
            return [name, "".join(f"[{key!r}]" for key in error.absolute_path), error.message[:300]]
    return []
