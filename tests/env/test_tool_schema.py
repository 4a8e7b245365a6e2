"""Arguments are checked by the schema alone: nothing is fetched, and neither side can make the check endless or fatal."""

from __future__ import annotations

import time
from typing import Any

import pytest
from testing.hostile import CANARY, CANARY_HOST, harmless

from vlmrl.env import schema_check, tool_schema
from vlmrl.env.tool_calls import ToolCall
from vlmrl.env.tool_schema import check_tools
from vlmrl.env.tools import problem_with
from vlmrl.utils.bounded import BoundedFunction

DEEP: Any = 1
for _ in range(900):
    DEEP = [DEEP]


def problem(parameters: Any, **arguments: Any) -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return problem_with(ToolCall("f", arguments), [tool])


@pytest.fixture
def short_limit(monkeypatch):
    """A quarter of a second of CPU for a check, which has 2: what would not end meets either."""
    check = BoundedFunction(f"{schema_check.__file__}:schema_errors", cpu_seconds=0.25)
    monkeypatch.setattr(tool_schema, "_bounded_check", check)
    assert problem(takes({"pattern": "^a*$"}), a="aaa") == ""  # a usual one meets neither
    yield
    check.close()


def takes(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    "reference",
    [
        f"http://{CANARY_HOST}/schema.json",
        f"https://{CANARY_HOST}/schema.json#/a",
        f"file://{CANARY}",
        f"ftp://{CANARY_HOST}/a",
        CANARY,
        "schema.json",
        "#/$defs/missing",
        "urn:example:a",
    ],
)
def test_a_reference_to_another_document_is_not_followed_and_allows_any_value(reference: str):
    for keyword in ("$ref", "$dynamicRef"):
        with harmless(reference, allowed=("bounded_worker",)):
            assert problem(takes({keyword: reference}), a=1) == ""
    with harmless(reference, allowed=("bounded_worker",)):
        assert problem({"$schema": reference, **takes({"type": "integer"})}, a="x") != ""
        problem({"$id": f"http://{CANARY_HOST}/base/", **takes({"$ref": "other.json"})}, a=1)


@pytest.mark.slow
def test_references_inside_the_schema_are_followed():
    inside = takes({"$ref": "#/$defs/size"}, **{"$defs": {"size": {"type": "integer"}}})
    assert problem(inside, a=1) == "" and problem(inside, a="x") == "f: arguments.a: 'x' is not of type 'integer'."
    own = {"$id": f"http://{CANARY_HOST}/f.json", **takes({"$ref": "f.json#/$defs/size"}, **inside)}
    assert problem(own | {"properties": {"a": {"$ref": "f.json#/$defs/size"}}}, a="x") != ""


@pytest.mark.slow
def test_properties_that_a_reference_declares_are_known():
    schema = {"$ref": "#/$defs/all", "$defs": {"all": takes({"type": "integer"})}}
    assert problem(schema, a=1) == "" and "'x' is not of type 'integer'" in problem(schema, a="x")


def test_a_boolean_schema_is_one():
    assert problem(takes(True), a=1) == "" and "False schema" in problem(takes(False), a=1)


@pytest.mark.slow
def test_undeclared_arguments_are_refused_unless_a_pattern_allows_them():
    assert problem(takes({}), b=1, c=2) == (
        "f: arguments: Additional properties are not allowed ('b', 'c' were unexpected)."
    )
    patterns = takes({}, patternProperties={"^x": {"type": "integer"}})
    assert problem(patterns, x1=1) == "" and problem(patterns, x1="s") != "" and "'y'" in problem(patterns, y=1)
    assert problem(takes({}, additionalProperties={"type": "integer"}), b="s") != ""
    assert problem(takes({}, additionalProperties=True), b="s") == ""
    assert problem(takes({"pattern": "^[0-9]+$"}), a="12") == "" and "does not match" in problem(
        takes({"pattern": "^[0-9]+$"}), a="x"
    )


def chain(count: int) -> dict[str, Any]:
    """A schema of ``count`` definitions, each of which refers to the next one twice."""
    definitions: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return takes({"$ref": "#/$defs/d0"}, **{"$defs": {**definitions, f"d{count}": {"type": "integer"}}})


LIST = {"$defs": {"list": {"type": ["array", "integer"], "items": {"$ref": "#/$defs/list"}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (chain(60), 1),
        (takes({"pattern": "^(a|a)*$"}), "a" * 60 + "b"),
        (takes({"patternProperties": {"^(a|a)*$": {}}}), {"a" * 60 + "b": 1}),
        (takes({"additionalProperties": False, "patternProperties": {"^(a|a)*$": {}}}), {"a" * 60 + "b": 1}),
        (takes({"propertyNames": {"pattern": "^(a|a)*$"}}), {"a" * 60 + "b": 1}),
        (takes({"items": {"anyOf": [{"type": "string"}] * 100}}), [1] * 40_000),
        (takes({"$ref": "#/$defs/list"}, **LIST), DEEP),
        (takes({"$ref": "#/properties/a"}), 1),
        ({"$ref": "#"}, 1),
    ],
    ids=[
        "doubling",
        "pattern",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "anyOf",
        "deep",
        "loop",
        "root",
    ],
)
def test_a_check_that_would_not_end_is_the_models_problem(schema: Any, value: Any, short_limit):
    began = time.process_time()
    assert problem(schema, a=value) == "f: arguments: they are too large or nested too deeply to be checked."
    assert time.process_time() - began < 60  # without limits it is for ever


MIXED: list[Any] = [each for number in range(5000) for each in (number, str(number))]  # cannot be sorted
RANGES = "(?i)" + "[\0-\uffff]" * 1000  # 20 ms of compiling for each


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": MIXED},
        {"$schema": "http://json-schema.org/draft-04/schema#", "enum": MIXED},
        {"pattern": RANGES},
    ],
    ids=["types", "enum", "pattern"],
)
def test_tools_whose_check_would_not_end_are_refused(schema: Any, monkeypatch):
    check = BoundedFunction(f"{schema_check.__file__}:wrong_schema", cpu_seconds=0.25)
    monkeypatch.setattr(tool_schema, "_bounded_schemas", check)
    schema = takes(schema, **{key: schema[key] for key in ("$schema",) if key in schema})
    with pytest.raises(ValueError, match="env E: the parameters of its tools are too large to be checked"):
        check_tools([{"name": "f", "parameters": schema}], "env E")
    check.close()


@pytest.mark.slow
def test_a_long_schema_is_checked_too():
    wrong = takes({"type": "text"}, description="." * 10_000)
    with pytest.raises(ValueError, match=r"tool 'f'\['properties'\]\['a'\]\['type'\] are not a valid JSON schema"):
        check_tools([{"name": "f", "parameters": wrong}], "env E")


@pytest.mark.slow
def test_items_are_compared_as_json_and_too_many_are_the_models_problem():
    unique = takes({"type": "array", "uniqueItems": True})
    assert problem(unique, a=[1, True, "1", [1], [True], {"a": 1}, {"a": True}, 0, False, None, [], {}]) == ""
    assert all("non-unique" in problem(unique, a=[a, b]) for a, b in ((1, 1.0), ([1], [1.0]), ({"a": 1}, {"a": 1.0})))
    assert "too large" in problem(unique, a=[{"x": [i, {}]} for i in range(20_000)])


def test_a_number_that_no_float_can_hold_is_the_models_problem():
    """The response of a policy must not be taken for a wrong schema, which is an env error."""
    assert "too large" in problem(takes({"multipleOf": 0.5}), a=10**400)


def test_arguments_that_are_nested_deeply_are_only_wrong():
    assert problem(takes({"type": "integer"}), a=DEEP).startswith("f: arguments")


@pytest.mark.parametrize("schema", [takes({"type": "text"}), {"properties": 5}, takes({"enum": 5}), [1], takes(5)])
def test_a_schema_that_is_none_is_an_env_error_that_names_the_tool(schema: Any):
    with pytest.raises(RuntimeError, match="tool f: its JSON schema is wrong"):
        problem(schema, a="x")


@pytest.mark.slow
def test_a_pattern_that_cannot_be_read_allows_any_value():
    """It may be of another dialect, as ECMA's `[^]`."""
    assert problem(takes({"pattern": "("}), a="x") == ""
    assert problem(takes({"type": "string", "pattern": "^[^]$"}), a="x") == ""
    assert "does not match" in problem(takes({"type": "string", "pattern": "^b$"}), a="x")
