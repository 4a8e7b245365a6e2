"""A response in the parts that clients know: calls of each format, reasoning, stop strings, and the content before the first call."""

from __future__ import annotations

import json

import pytest
from testing.templates import TEMPLATES, real_renderer

from vlmrl.env import tool_calls
from vlmrl.env.tool_calls import ToolCall, read_tool_calls
from vlmrl.gateway.responses import split_response

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
TWO = ToolCall("add", {"a": 2})


def split(text: str, tools=(ADD,), tool_format: str = "json", reads_calls: bool = True, stop=()):
    return split_response(text, tools, tool_format, reads_calls=reads_calls, stop=stop)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("", "", [])),
        ("  four\n", ("  four\n", "", [])),
        (CALL, ("", "", [TWO])),
        (f"a {CALL} b\n{CALL}\n", ("a ", "", [TWO, TWO])),
        (f"{CALL}\n{CALL}", ("", "", [TWO, TWO])),  # as Qwen's templates write two
        (f"<think>\nhm\n</think>\n\n{CALL}", ("", "\nhm\n", [TWO])),  # as they write one after reasoning
        (f"<think>\nhm\n</think>\n\nSo: {CALL}", ("\n\nSo: ", "\nhm\n", [TWO])),
        (f"hm</think>So{CALL}", ("So", "hm", [TWO])),  # the template opened it
        (f"<think>hm {CALL}", ("", f"hm {CALL}", [])),  # cut off while it thought
        (f"<think>a</think>b<think>c</think>d{CALL}", ("d", "a</think>b<think>c", [TWO])),
        (f"a <think> {CALL}", (f"a <think> {CALL}", "", [])),
        (f"{CALL}<think>{CALL}", ("", "", [TWO])),
        ("<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [])),
        (f"<tool_call>nothing</tool_call>{CALL}", ("<tool_call>nothing</tool_call>", "", [TWO])),
        (f"<tool_call>\n{{</tool_call>\na{CALL}", ("<tool_call>\n{</tool_call>\na", "", [TWO])),
        (f"{CALL}<tool_call>\n{{", ("", "", [TWO])),
        (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "", []),
        ),
        ('<tool_call>{"name": "other"}</tool_call>', ("", "", [ToolCall("other")])),  # the agent knows its tools
        # no client could send this call back
        ('<tool_call>{"name": "\\ud800"}</tool_call>', ('<tool_call>{"name": "\\ud800"}</tool_call>', "", [])),
    ],
)
def test_parts_of_a_response(text, parts):
    assert split(text) == parts


@pytest.mark.parametrize("options", [{"tools": ()}, {"reads_calls": False}])
def test_a_call_stays_text_where_none_is_read(options):
    assert split(f"<think>hm</think>{CALL}", **options) == (CALL, "hm", [])


@pytest.mark.parametrize(
    ("text", "stop", "content", "calls"),
    [
        ("four. STOP and", ("STOP",), "four. ", 0),
        ("a b c", ("c", "b"), "a ", 0),
        ("a b", ("x",), "a b", 0),
        (f"a{CALL}", ("</tool_call>",), "a", 1),
        (f"a{CALL}\nSTOP", ("STOP",), "a", 1),
        ("<think>hm STOP", ("STOP",), "", 0),
    ],
)
def test_content_ends_before_a_stop_string(text, stop, content, calls):
    got, _, read = split(text, stop=stop)
    assert got == content and len(read) == calls


@pytest.mark.parametrize(
    ("opening", "text", "stop", "parts"),
    [
        ("<think>\n", "hm\n</think>\n\nred", (), ("\n\nred", "\nhm\n", [])),
        ("<think>\n", "hm\nred", ("\n",), ("", "\nhm", [])),
        ("<think>\n\n</think>\n\n", "red", (), ("red", "", [])),
        ("<think>\n\n</think>\n\n", "red\n\nblue", ("\n\n",), ("red", "", [])),
    ],
)
def test_what_the_generation_prompt_writes_is_no_part_of_the_content_and_holds_no_stop(opening, text, stop, parts):
    assert split_response(text, (), "xml", reads_calls=True, stop=stop, opening=opening) == parts


def test_xml_calls_have_the_types_of_their_schemas():
    assert split(f"a{XML}", tool_format="xml") == ("a", "", [TWO])
    strange = {"type": "function", "function": {"name": "add", "parameters": {"properties": [1]}}}
    assert split(XML, (strange,), "xml")[2] == [ToolCall("add", {"a": "2"})]  # no JSON schema, no types


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "qwen2_5_vl"])  # it shows no tools
def test_a_call_that_a_real_template_writes_is_read_back(template, shared):
    """The template shows a call of the assistant; what it wrote is split into the call and the text around it."""
    real = real_renderer(shared, "qwen3-vl", template)
    arguments = {"a": 2, "b": "two <lines>\n& 'quotes'"}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Adding.", "tool_calls": [call]},
    ]
    text = real.tokenizer.apply_chat_template(messages, tools=[ADD], chat_template=real.chat_template, tokenize=False)
    written = text.rpartition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    content, _, calls = split(written, tool_format=real.tool_format)
    assert calls == [ToolCall("add", arguments)] and content.strip() == "Adding."
    assert calls == read_tool_calls(written, [ADD], real.tool_format)


def test_any_response_is_content_or_calls(hostile):
    """What is left out of the content is reasoning, its tags, and calls that parse."""
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "add"}',
        "a",
        "\n",
        json.dumps("é"),
        CALL,
        XML,
    ]
    for rng in hostile("responses"):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        content, reasoning, calls = split(text)
        assert len(content) + len(reasoning) <= len(text)
        assert len(calls) == sum(not call.problem for call in read_tool_calls(text, [ADD], "json"))
        if not calls and "think>" not in text:
            assert (content, reasoning) == (text, "")


def test_the_time_is_in_proportion_to_the_text():
    size = 200_000  # a quadratic search would take minutes
    assert split("<tool_call>" * size)[0] == "<tool_call>" * size
    assert split("<think>" * size)[1] == "<think>" * (size - 1)


@pytest.mark.parametrize("tool_format", ["xml", "glm"])
def test_tools_are_looked_up_once_for_all_calls(tool_format, monkeypatch):
    """3,000 calls among 3,000 tools took the event loop 3 s."""
    looked = []
    monkeypatch.setattr(tool_calls, "tool_name", lambda tool: looked.append(tool) or tool["name"])
    tools = [{"name": f"tool{number}"} for number in range(10)]
    text = {"xml": "<function=tool3></function>", "glm": "tool3"}[tool_format]
    calls = split_response(f"<tool_call>{text}</tool_call>" * 5, tools, tool_format, reads_calls=True)[2]
    assert [call.name for call in calls] == ["tool3"] * 5 and len(looked) == 10
