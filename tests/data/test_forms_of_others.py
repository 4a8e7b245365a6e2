"""Rows in the forms of other programs that would be read in part, in a prompt or in a fine-tuning: each is a bad row, or warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmrl import SFT, Config, Conversations, Data
from vlmrl.data import load_tasks
from vlmrl.data.conversations import load_conversations
from vlmrl.multimodal.masks import RowError
from vlmrl.types import Task

TOOL = {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}
ASK = {"role": "user", "content": "a"}
SAY = {"role": "assistant", "content": "b"}
CALL = SAY | {"content": "", "tool_calls": [{"name": "f", "arguments": {}}]}


def written(folder: Path, row: dict[str, Any]) -> str:
    for name in "01":
        Image.new("RGB", (64, 64)).save(folder / f"{name}.png")
    (path := folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return str(path)


def conversation(folder: Path, row: dict[str, Any], **columns: str) -> Task:
    data = Conversations(path=written(folder, row), columns=columns)
    return load_conversations(Config(sft=SFT(data={"main": data})))[0][0]


def prompt(folder: Path, messages: Any, **columns: Any) -> Task:
    return load_tasks(Data(written(folder, {"prompt": messages} | columns), seed=None))[0]


def refused(
    folder: Path, messages: list[dict[str, Any]], match: str, reason: str = "unreadable", **columns: Any
) -> None:
    """As a conversation with a response at its end, and as a prompt."""
    with pytest.raises(RowError, match=match) as error:
        conversation(folder, {"messages": [*messages, SAY]} | columns)
    assert error.value.reason == reason
    with pytest.raises(ValueError, match=match):
        prompt(folder, messages, **columns)


# Marks of images


@pytest.mark.parametrize("mark", ["<image {}>", "<image_{}>", "<|image_{}|>", "<Image{}>", "<image_0{}>", "<img_{}>"])
def test_numbered_marks_of_images_are_a_bad_row(tmp_path, mark):
    """As of MMMU or Phi: all images went before the text, and the marks were read as text, unsaid."""
    text = f"Is {mark.format(1)} a part of {mark.format(2)}?"
    refused(tmp_path, [ASK | {"content": text}], r"the mark .*1.*write <image>", "images", images=["0.png", "1.png"])


@pytest.mark.parametrize(
    "mark",
    ["<|vision_start|><|image_pad|><|vision_end|>", "<|image|>", "<ImageHere>", "<image_placeholder>", "<IMAGE>"],
)
def test_marks_of_images_of_other_programs_are_a_bad_row(tmp_path, mark):
    refused(tmp_path, [ASK | {"content": f"What? {mark}"}], r"the mark .*write <image>", "images", images=["0.png"])
    with pytest.raises(ValueError, match=r"the mark .*write <image>"):
        prompt(tmp_path, f"{mark} What?", images=["0.png"])


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("<image>Compare <image 1> with a dog.", {"images": ["0.png"]}),
        ("Write HTML with an <img> tag.", {"images": ["0.png"]}),
        ("<image> and this", {"images": ["0.png", "1.png"]}),
        ("Write HTML with an <IMG> tag.", {"images": ["0.png"]}),
        ("What does <image 1> mean? What is <|image_pad|>?", {}),
        ("As JSON: <item><img>https://a.org/p.jpg</img></item>. What does <video>a.mp4</video> do?", {}),
        ("<image>Write XML like <img>a.png</img>.", {"images": ["0.png"]}),
    ],
)
def test_texts_about_marks_are_no_bad_row(tmp_path, text, columns):
    images = len(columns.get("images", []))
    assert len(prompt(tmp_path, text, **columns).images) == images
    if images < 2:  # a conversation needs a mark for each image, or none
        row = {"messages": [ASK | {"content": text}, SAY]} | columns
        assert len(conversation(tmp_path, row).images) == images


def test_numbered_marks_beside_parts_of_images_are_no_bad_row(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "What is <image 1>?"}]
    row = {"messages": [ASK | {"content": parts}, SAY], "images": ["0.png"]}
    assert len(conversation(tmp_path, row).images) == 1


@pytest.mark.parametrize("tag", ["<img>0.png</img>", "<img>https://a.org/x.jpeg</img>", "<video>a.mp4</video>"])
def test_files_that_are_named_in_a_text_are_a_bad_row(tmp_path, tag):
    """As of Qwen-VL and ms-swift: the model read the path, and was trained without the image, unsaid."""
    for text in (f"Picture 1: {tag}\nWhat?", f"What?\n{tag}"):
        refused(tmp_path, [ASK | {"content": text}], "names a file in <(img|video)>", "marks")


# Texts of responses


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>\n", "</s> ", "<|eot_id|>"])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_response_that_ends_as_a_chat_template_does_is_a_bad_row(tmp_path, end, as_parts):
    """The model was trained to write the token as text, and then the token."""
    text = f"It is 3.{end}"
    said = SAY | {"content": [{"type": "text", "text": text}] if as_parts else text}
    refused(tmp_path, [ASK, said, ASK], r"a response ends with .* as text: remove it")


@pytest.mark.parametrize(
    "text", ["<|im_end|> ends a turn.", "It is <s>3</s>, I say", "", "<|box_end|>", "<p>It is <s>3</s>"]
)
def test_a_response_about_such_tokens_is_no_bad_row(tmp_path, text):
    assert conversation(tmp_path, {"messages": [ASK, SAY | {"content": text}, ASK, SAY]}).prompt[1]["content"] == text


# Fields of messages


@pytest.mark.parametrize(
    ("role", "name", "value"),
    [
        ("system", "functions", json.dumps([TOOL])),
        ("system", "tools", [TOOL]),
        ("assistant", "function_calls", "f(a=1)"),
        ("assistant", "tool_call", {"name": "f", "arguments": {}}),
        ("tool", "observation", "It is 3."),
    ],
)
def test_tools_calls_and_results_beside_the_content_are_a_bad_row(tmp_path, role, name, value):
    """As of Olmo and GLM: a prompt did not show the tools, an empty response was trained, or a result was empty."""
    message = {"role": role, "content": "", name: value}
    messages = [message, ASK] if role == "system" else [ASK, CALL, message, ASK]
    if role == "assistant":
        messages = [ASK, message, ASK]
    refused(tmp_path, messages, f"the role '{role}' has '{name}' beside its content")


def test_a_function_call_of_openais_earlier_form_is_a_bad_row_in_a_prompt_alone(tmp_path):
    call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(ValueError, match="has 'function_call' beside its content"):
        prompt(tmp_path, [ASK, call, ASK])
    assert conversation(tmp_path, {"messages": [ASK, call]}).prompt[1]["tool_calls"]


@pytest.mark.parametrize("name", ["output", "result", "response", "text"])
def test_a_result_of_a_tool_under_another_name_is_a_bad_row(tmp_path, name):
    """The model read an empty result."""
    for content in ({}, {"content": ""}):
        answer = {"role": "tool", "tool_call_id": "c", name: "It is 3."} | content
        refused(tmp_path, [ASK, CALL, answer, ASK], f"the role 'tool' has no 'content', only .*'{name}'")


def test_a_function_call_beside_the_same_tool_calls_is_no_bad_row(tmp_path):
    both = CALL | {"function_call": {"name": "f", "arguments": "{}"}}
    assert len(conversation(tmp_path, {"messages": [ASK, both]}).prompt[1]["tool_calls"]) == 1
    assert len(prompt(tmp_path, [ASK, both, {"role": "tool", "content": "1"}, ASK]).prompt) == 4


def test_messages_with_other_fields_are_no_bad_row(tmp_path):
    """Of a table, each message has the fields of all; some agents keep what they know of a message in it."""
    empty = {"functions": "[]", "function_calls": "null", "tools": [], "observation": None}
    answer = {"role": "tool", "content": None, "tool_call_id": "c", "name": "f", "agent": "main"}
    messages = [each | empty for each in (ASK, CALL, answer, SAY)]
    assert len(conversation(tmp_path, {"messages": messages}).prompt) == 4


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_parts_that_are_written_as_a_text_are_a_bad_row(tmp_path, role):
    """The model read, or was trained to write, the JSON."""
    parts = json.dumps([{"type": "text", "text": "What?"}, *[{"type": "image", "image": "0.png"}] * (role == "user")])
    messages = [ASK | {"content": parts}] if role == "user" else [ASK, SAY | {"content": parts}, ASK]
    refused(tmp_path, messages, f"the role '{role}' has the parts of its content written as a text")


@pytest.mark.parametrize(
    "text", ['[{"type": "text", "bbox": [1, 2], "text": "x"}]', "[]", "[1", '[{"text": "x"}]', '[{"type": "text"}, 1]']
)
def test_a_text_in_json_that_is_no_list_of_parts_is_no_bad_row(tmp_path, text):
    row = {"messages": [ASK, SAY | {"content": text}, ASK | {"content": text}, SAY]}
    assert [message["content"] for message in conversation(tmp_path, row).prompt] == ["a", text, text, "b"]


def test_a_response_may_be_an_answer_in_json(tmp_path):
    text = json.dumps([{"type": "text", "text": "Title"}, {"type": "image", "path": "figure.png"}])
    assert conversation(tmp_path, {"messages": [ASK, SAY | {"content": text}]}).prompt[1]["content"] == text


def test_a_result_of_a_tool_may_be_the_json_of_parts(tmp_path):
    """That is what clients make of an MCP server's results."""
    answer = {"role": "tool", "content": '[{"type": "text", "text": "20"}]'}
    assert conversation(tmp_path, {"messages": [ASK, CALL, answer, SAY]}).prompt[2]["content"] == answer["content"]


# Tools under another name


@pytest.mark.parametrize(
    "value", [[TOOL], json.dumps([{"type": "function", "function": TOOL}]), [{"name": "f", "input_schema": {}}]]
)
def test_tools_in_a_column_of_another_name_are_a_bad_row_beside_calls(tmp_path, value):
    """The calls were trained behind a prompt that does not show the tools, unsaid."""
    row = {"messages": [ASK, CALL], "available_tools": value}
    with pytest.raises(RowError, match=r"calls, but no tools: .* 'available_tools'.*columns") as error:
        conversation(tmp_path, row)
    assert error.value.reason == "unreadable"
    shown = conversation(tmp_path, row, tools="available_tools").data["tools"]
    assert shown == (json.loads(value) if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("messages", "columns"),
    [
        ([{"role": "system", "content": "Tools: f, which does f."}, ASK, CALL], {"available_tools": [TOOL]}),
        ([ASK, SAY], {"available_tools": [TOOL]}),
        ([ASK, CALL], {"tool_names": ["f"], "tool_count": 1, "tool_text": "[f", "tool_calls": [{"name": "f"}]}),
        ([ASK, CALL], {"tools": [TOOL], "available_tools": [TOOL]}),
    ],
)
def test_columns_of_tools_that_may_be_left_out_are_no_bad_row(tmp_path, messages, columns):
    assert conversation(tmp_path, {"messages": messages} | columns).prompt


# Prompts in a chat template


@pytest.mark.parametrize("text", ["<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na", "<s>[INST] a [/INST]"])
def test_prompts_that_are_written_in_a_chat_template_are_warned_of(tmp_path, text):
    """As of TinyZero: the model read the tokens of turns as text in a message of the user, unsaid."""
    for prompt in (text, [ASK | {"content": text}]):
        (warning,) = load_tasks(Data(written(tmp_path, {"prompt": prompt}))).warnings
        assert warning.startswith("column 'prompt' holds prompts that are written in a chat template")
    assert not load_tasks(Data(written(tmp_path, {"prompt": "What is <|im_start|>? <s>x</s>"}))).warnings
