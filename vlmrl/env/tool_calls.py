"""Parses the tool calls of a response, in one of the formats that chat templates use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vlmrl.utils.json_files import strict_json
from vlmrl.utils.require import require

Schema = dict[str, Any]
Tools = Sequence[Schema] | Mapping[str, Schema]

MAX_DEPTH = 100  # of nested arguments and tool schemas
MAX_PARTS = 500  # of a schema, and values, that are looked at for the types of an argument
XML_FORM = "a call is <function=NAME>, then <parameter=NAME>value</parameter> for each argument, then </function>."
GLM_FORM = "a call is NAME, then <arg_key>NAME</arg_key> and <arg_value>value</arg_value> for each argument, between <tool_call> tags."
LITERALS = {"true": True, "false": False, "none": None, "null": None}  # templates write Python's, models JSON's
JSON_TYPES = {
    str: "string",
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it: ``ToolCall("zoom", {"bbox": [0, 0, 500, 500]})``. ``problem`` says why it could not be parsed."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_tool_calls(text: str, tools: Tools = (), tool_format: str | None = None) -> list[ToolCall]:
    """The calls of a response, in order, without those inside its reasoning (``<think>``).

    ``tool_format`` is a key of :data:`TOOL_FORMATS`; ``None`` means ``json``. The formats ``xml`` and ``glm`` have no types, or not
    of all values, so these are converted to the types in the schemas ``tools``, a list or as :func:`by_name` gives them.
    """
    name = tool_format or "json"
    require(name in TOOL_FORMATS, "tool_format", f"one of {', '.join(TOOL_FORMATS)}", name)
    response = text.rpartition("</think>")[2].partition("<think>")[0]
    return TOOL_FORMATS[name](response, tools)


def read_json_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``: Qwen2.5, Qwen3, Qwen3-VL, and vlmrl's templates."""
    return _each_call(text, _read_json_call)


def read_xml_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``: Qwen3.5, Qwen3.6, Qwen3-Coder."""
    schemas = by_name(tools)
    return _each_call(text, lambda body: _read_xml_call(body.strip(), schemas))


def read_glm_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """``<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``, newlines between: GLM-4.5 and later."""
    schemas = by_name(tools)
    return _each_call(text, lambda body: _read_glm_call(body, schemas))


def by_name(tools: Tools) -> Mapping[str, Schema]:
    """The schemas by their names. To be made once where many calls are read one by one."""
    return tools if isinstance(tools, Mapping) else {tool_name(tool): tool for tool in tools}


TOOL_FORMATS: dict[str, Callable[[str, Tools], list[ToolCall]]] = {
    "json": read_json_calls,
    "xml": read_xml_calls,
    "glm": read_glm_calls,
}


def read_tags(text: str, tag: str) -> list[str]:
    """What is between ``<tag>`` and ``</tag>``, in order: ``read_tags("<answer>a</answer> <answer>b", "answer")`` is ``["a"]``.

    Responses are hostile input: the search takes time in proportion to the text, which a pattern such as
    ``<answer>(.*?)</answer>`` does not (it starts again at each opening tag that is never closed).
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    texts, position = [], 0
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start)) >= 0:
        texts.append(text[start + len(opening) : end])
        position = end + len(closing)
    return texts


def _each_call(text: str, read: Callable[[str], ToolCall]) -> list[ToolCall]:
    bodies: list[str | None] = [*read_tags(text, "tool_call")]
    if "<tool_call>" in text.rpartition("</tool_call>")[2]:
        bodies.append(None)  # a last call that is not closed
    calls = []
    for body in bodies:
        try:
            if body is None:
                raise ValueError("the call does not end with </tool_call>.")
            call = read(body)
            if is_deep(call.arguments):
                raise ValueError(f"the arguments are nested more than {MAX_DEPTH} levels deep.")
            json.dumps([call.name, call.arguments], ensure_ascii=False).encode()  # raises for half a surrogate pair
        except (ValueError, RecursionError) as error:
            call = ToolCall(problem=str(error))
        calls.append(call)
    return calls


def _read_json_call(body: str) -> ToolCall:
    try:
        call = strict_json(body)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = strict_json(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON: {error}.") from None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        name = name if isinstance(name, str) else ""
        return ToolCall(name, problem='a call is {"name": <name>, "arguments": <object>}.')
    return ToolCall(name, arguments)


def is_deep(value: dict[str, Any] | list[Any]) -> bool:
    """Whether arguments or schemas are nested so deeply that code which follows them would exceed Python's stack."""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in layer]
        layer = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not layer:
            return False
    return True


def _read_xml_call(body: str, schemas: Mapping[str, Schema]) -> ToolCall:
    header, closed, rest = body.removesuffix("</function>").partition(">")
    name = _xml_name(header, "<function=")
    if name is None or not closed or not body.endswith("</function>"):
        raise ValueError(XML_FORM)
    parameters = parameters_of(schemas.get(name, {}))
    arguments = _read_parameters(rest)
    return ToolCall(name, {key: _typed(value, key, parameters) for key, value in arguments.items()})


def _read_parameters(text: str) -> dict[str, str]:
    """``<parameter=a>1</parameter>`` is ``{"a": "1"}``. Raises ValueError for anything else than parameters and whitespace."""
    *parameters, rest = text.split("</parameter>")
    if rest.strip():
        raise ValueError(XML_FORM)
    values = {}
    for parameter in parameters:
        header, closed, value = parameter.lstrip().partition(">")
        name = _xml_name(header, "<parameter=")
        if name is None or not closed:
            raise ValueError(XML_FORM)
        values[name] = value.removeprefix("\n").removesuffix("\n")
    return values


def _xml_name(header: str, start: str) -> str | None:
    """``add`` in ``<function=add``; ``None`` if the header has another form."""
    name = header.removeprefix(start)
    is_name = header.startswith(start) and name and not {"<", "\n"} & set(name)
    return name.strip() if is_name else None


def _schema_of(key: str, parameters: Schema) -> Any:
    """The schema of the argument ``key``."""
    return parameters.get("properties", {}).get(key, parameters.get("additionalProperties", {}))


def _typed(text: str, key: str, parameters: Schema) -> Any:
    """An XML argument converted to its schema's type; unchanged if the schema allows strings, or if it cannot be converted."""
    schema = _schema_of(key, parameters)
    if not isinstance(schema, dict):  # `true` allows every value
        return text
    types = _types(schema, parameters)
    if not types or "string" in types:
        return None if schema.get("nullable") and text.lower() in ("none", "null") else text
    return _literal(text)


def _types(schema: Schema, parameters: Schema) -> set[str]:
    """The JSON types that a schema declares, by its parts and values and by references into ``parameters``, too; empty if none.

    Of a schema with more than MAX_PARTS parts and values, by the first ones: each argument of a response looks at them.
    """
    found, parts, followed = set[str](), [schema], set[str]()

    def add(more: Iterable[Any]) -> None:
        parts.extend(islice(more, MAX_PARTS - len(parts)))

    for option in parts:
        if not isinstance(option, dict):
            continue
        found.update(_as_list(option.get("type", [])))
        if "type" not in option:
            if "const" in option and type(option["const"]) in JSON_TYPES:
                found.add(JSON_TYPES[type(option["const"])])
            add({"const": value} for value in option.get("enum", ()))
        for keyword in ("anyOf", "oneOf", "allOf"):
            add(option.get(keyword, ()))
        reference = option.get("$ref", "")
        if reference.startswith("#/") and reference not in followed:
            followed.add(reference)
            add([_part(parameters, reference)])
    return found


def _part(schema: Any, reference: str) -> Any:
    """The part of a schema that ``#/$defs/Point`` names; None if there is none."""
    for key in reference.removeprefix("#/").split("/"):
        schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def _literal(text: str) -> Any:
    """The JSON value or Python literal in ``text``; ``text`` itself if it is neither."""
    if text.strip().lower() in LITERALS:
        return LITERALS[text.strip().lower()]
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return text


def _read_glm_call(body: str, schemas: Mapping[str, Schema]) -> ToolCall:
    name = body.partition("<arg_key>")[0]
    *pairs, rest = body[len(name) :].split("</arg_value>")
    rest, name = (rest, name.strip()) if pairs else ("", body.strip())
    if not name or {"<", "\n"} & set(name) or rest.strip():
        raise ValueError(GLM_FORM)
    parameters = parameters_of(schemas.get(name, {}))
    arguments = dict(_read_glm_pair(pair) for pair in pairs)
    return ToolCall(name, {key: _read_glm_value(value, key, parameters) for key, value in arguments.items()})


def _read_glm_pair(text: str) -> tuple[str, str]:
    """A key and its value, without the value's closing tag: ``<arg_key>a</arg_key><arg_value>1`` is ``("a", "1")``."""
    head, opened, value = text.partition("<arg_value>")
    before, key_opened, rest = head.partition("<arg_key>")
    key, key_closed, between = rest.partition("</arg_key>")
    if not (opened and key_opened and key_closed and key) or before.strip() or between.strip():
        raise ValueError(GLM_FORM)
    return key, value


def _read_glm_value(text: str, key: str, parameters: Schema) -> Any:
    """A value as chat templates of GLM write it: a string as it is, anything else as JSON.

    What the schema declares to be a string, by ``"type": "string"``, is never taken for JSON; where it declares other types beside
    strings, or strings in another way, what fits none of its types is a string.
    """
    schema = _schema_of(key, parameters)
    if not isinstance(schema, dict):
        return _literal(text)
    if schema.get("type") == "string" and not schema.get("nullable"):
        return text
    types = _types(schema, parameters) | ({"null"} if schema.get("nullable") else set())
    value = _literal(text)
    kind = JSON_TYPES[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return text if "string" in types and not fits else value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def tool_name(tool: Schema) -> str:
    return tool.get("function", tool)["name"]


def parameters_of(tool: Schema) -> Schema:
    return tool.get("function", tool).get("parameters") or {}
