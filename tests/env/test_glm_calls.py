"""Calls in GLM's form: what the chat template `glm` writes is read as the same call; what has another form is explained."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from vlmrl.env.tool_calls import ToolCall, read_tool_calls
from vlmrl.env.tools import problem_with, tool_schema
from vlmrl.families.glm4v import Glm4V
from vlmrl.model import tiny
from vlmrl.multimodal.renderer import Renderer

WORDS = Glm4V.tiny_tokenizer(tiny.tokenizer())
PIECES = (
    *('5', '-1.5e3', "null", "None", "true", "False", "NaN", '"', '"5"', "[", "]", "{", "}", '{"a": 1}', "\\", "\\n", "\\u003c"),
    *("\n", " ", "\t", "\r", "a", "red", "é", "猫", "🎈", "\U00100000", "\u2028", "<", "</", ">", "<b>", "&lt;", "<arg", "{{", "{%"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "<tool_call>", "<tool_response>", "<|user|>", "<|observation|>", "[gMASK]"),
)  # fmt: skip


def look(text: str, note: str | None, boxes: list[list[float]], count: int | str, deep: dict[str, Any]) -> str:
    """Look.

    Args:
        text: One.
        note: Two.
        boxes: Three.
        count: Four.
        deep: Five.
    """
    return text


LOOK = tool_schema(look)
LOOK["function"]["parameters"]["properties"]["any"] = True
LOOK["function"]["parameters"]["properties"]["union"] = {
    "anyOf": [{"type": "string", "pattern": "a"}, {"type": "string"}]
}
LOOK["function"]["parameters"]["properties"]["listed"] = {"type": ["string"]}
LOOK["function"]["parameters"]["properties"]["side"] = {"$ref": "#/$defs/Side"}
LOOK["function"]["parameters"]["$defs"] = {"Side": {"type": "string", "enum": ["5"]}}
UNKNOWN = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def words(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 6)))


def value(rng: random.Random, depth: int = 2) -> Any:
    kinds = [
        words,
        lambda _: rng.randint(-9, 10**20),
        lambda _: rng.uniform(-1, 1),
        lambda _: rng.choice([None, True, False, 0, 1.0, ""]),
    ]
    if depth:
        kinds += [lambda _: [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]]
        kinds += [lambda _: {words(rng): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}]
    return rng.choice(kinds)(rng)


def arguments(rng: random.Random) -> dict[str, Any]:
    made = {
        "text": words(rng),
        "note": rng.choice([None, words(rng), "null", "None"]),
        "boxes": [[rng.random() for _ in range(4)] for _ in range(rng.randint(0, 2))],
        "count": rng.choice([words(rng), rng.randint(-5, 5), "5"]),
        "deep": {words(rng): value(rng)},
        "any": value(rng),
        "union": words(rng),
        "listed": words(rng),
    }
    return {name: made[name] for name in rng.sample(sorted(made), rng.randint(0, len(made)))}


def responses_of(calls: list[ToolCall], content: str = "", renderer: Renderer | None = None) -> str:
    """What the template writes for a response with ``calls``, read back from its tokens."""
    own = renderer or Renderer(
        WORDS, image_token="<|image|>", stop_ids=WORDS.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    )
    listed = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    talk = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": content, "tool_calls": listed}]
    rendered, mask = own.conversation([*talk, {"role": "tool", "content": "."}], [LOOK, UNKNOWN])
    ids = [token for token, trained in zip(rendered.token_ids, mask, strict=True) if trained]
    return own.text(ids)


def test_calls_are_read_as_the_template_writes_them(hostile):
    for rng in hostile("glm calls"):
        for _ in range(25):
            calls = [
                ToolCall("look", arguments(rng))
                if rng.random() < 0.7
                else ToolCall("other", {f"key {i}": value(rng) for i in range(rng.randint(0, 3))})
                for _ in range(rng.randint(1, 3))
            ]
            text = responses_of(calls, rng.choice(["", "I look.", "<b>"]))
            found = read_tool_calls(text, [LOOK, UNKNOWN], "glm")
            assert found == calls, text
            assert json.dumps([call.arguments for call in found]) == json.dumps([call.arguments for call in calls])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("look", {}),
        ("look\n", {}),
        ("look\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n", {"text": "5"}),
        ("look<arg_key>text</arg_key><arg_value> a\n</arg_value>", {"text": " a\n"}),  # GLM-4.7 writes no newlines
        ("look\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n", {"count": 5}),
        ("look\n<arg_key>count</arg_key>\n<arg_value>5.5</arg_value>\n", {"count": "5.5"}),
        ("look\n<arg_key>note</arg_key>\n<arg_value>5</arg_value>\n", {"note": "5"}),
        ("look\n<arg_key>note</arg_key>\n<arg_value>None</arg_value>\n", {"note": None}),
        ("look\n<arg_key>boxes</arg_key>\n<arg_value>\n[[1, 2]]\n</arg_value>\n", {"boxes": [[1, 2]]}),
        ("look\n<arg_key>boxes</arg_key>\n<arg_value>[1, </arg_value>\n", {"boxes": "[1, "}),
        ("look\n<arg_key>boxes</arg_key>\n<arg_value>NaN</arg_value>\n", {"boxes": "NaN"}),
        ("look\n<arg_key>any</arg_key>\n<arg_value>red</arg_value>\n", {"any": "red"}),
        ("look\n<arg_key>union</arg_key>\n<arg_value>5</arg_value>\n", {"union": "5"}),
        ("look\n<arg_key>listed</arg_key>\n<arg_value>null</arg_value>\n", {"listed": "null"}),
        ("look\n<arg_key>side</arg_key>\n<arg_value>5</arg_value>\n", {"side": "5"}),
        ("look\n<arg_key>new</arg_key>\n<arg_value>true</arg_value>\n", {"new": True}),
    ],
)
def test_values_have_the_types_of_the_schema(body: str, arguments: dict[str, Any]):
    assert read_tool_calls(f"Yes.<tool_call>{body}</tool_call>", [LOOK], "glm") == [ToolCall("look", arguments)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "\n",
        '{"name": "look", "arguments": {}',
        "look\nclosely",
        "<arg_key>text</arg_key><arg_value>5</arg_value>",
        "look <arg_key>text</arg_key>",
        "look <arg_value>5</arg_value>",
        "look <arg_key>text<arg_value>5</arg_value>",
        "look <arg_key></arg_key><arg_value>5</arg_value>",
        "look <arg_key>text</arg_key>=<arg_value>5</arg_value>",
        "look <arg_key>text</arg_key><arg_value>5</arg_value>.",
        "look <arg_key>text</arg_key><arg_value>5</arg_value></arg_value>",
    ],
)
def test_another_form_is_explained(body: str):
    [call] = read_tool_calls(f"<tool_call>{body}</tool_call>", [LOOK], "glm")
    if body == '{"name": "look", "arguments": {}':
        assert call.name == body and "there is no tool" in problem_with(call, [LOOK])
    else:
        assert call.problem.startswith("a call is NAME, then <arg_key>NAME</arg_key> and <arg_value>value</arg_value>")


def test_a_call_that_is_not_closed_is_explained():
    [call] = read_tool_calls("<tool_call>look\n<arg_key>text</arg_key>", [LOOK], "glm")
    assert call.problem == "the call does not end with </tool_call>."


def test_arguments_must_be_an_object():
    with pytest.raises(TemplateError, match="the arguments of a tool call must be an object, not a string"):
        responses_of([ToolCall("look", '{"text": "red"}')])  # type: ignore[arg-type]
