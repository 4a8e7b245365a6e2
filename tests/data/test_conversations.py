"""Conversations in the usual forms become the same messages; bad rows have reasons and name their index."""

import base64
import io
import json
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from vlmrl import SFT, Config, Conversations, Data
from vlmrl.data import load_tasks
from vlmrl.data.conversations import load_conversations
from vlmrl.multimodal.images import load_image
from vlmrl.multimodal.masks import RowError


def load(path, **settings):
    return load_conversations(Config(sft=SFT(data={"main": Conversations(path=str(path), **settings)})))


def test_an_unreadable_dataset_is_named_by_its_own_setting(tmp_path):
    (tmp_path / "rows.jsonl").write_text("[1")
    with pytest.raises(ValueError, match=r"^sft\.data\.main\.path cannot be read: .*rows\.jsonl"):
        load(tmp_path / "rows.jsonl")


def written(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8))


def png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "png")
    return file.getvalue()


def shape(task) -> list:
    """Roles, texts, the brightness of images, and calls."""
    shown = []
    for message in task.prompt:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        pieces = [p["text"] if p["type"] == "text" else load_image(p["image"]).getpixel((0, 0))[0] // 20 for p in parts]
        shown.append(
            (message["role"], *[p for p in pieces if p != ""], *[c["function"] for c in message.get("tool_calls", [])])
        )
    return shown


CALL = {"name": "zoom", "arguments": {"x": [1, 2]}}
TALK = [
    ("system", "S"),
    ("user", 1, "What?"),
    ("assistant", "Look.", CALL),
    ("tool", 2, "Closer."),
    ("assistant", "A dog."),
]


def uri(number: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(number)).decode()


def openai(first, second, arguments) -> list:
    call = {"id": "c", "type": "function", "function": CALL | {"arguments": arguments}}
    return [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [first, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [second, {"type": "text", "text": "Closer."}]},
        {"role": "assistant", "content": "A dog."},
    ]


def test_the_usual_forms_are_the_same_conversation(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    part = {"type": "image"}
    sourced = [{"type": "image_url", "image_url": {"url": uri(n)}} for n in (1, 2)]
    in_api_form = {
        "messages": openai(*sourced, json.dumps(CALL["arguments"])),
        "tools": [{"type": "function", "function": CALL}],
    }
    by_path = {"messages": openai(*(part | {"image": f"{n}.png"} for n in (1, 2)), CALL["arguments"])}
    trl = {"messages": openai(part, part, CALL["arguments"]), "images": ["1.png", "2.png"]}
    completed = {"prompt": by_path["messages"][:2], "completion": by_path["messages"][2:]}
    sharegpt = {
        "image": ["1.png", "2.png"],
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "<image>What?"},
            {"from": "gpt", "value": "Look.", "tool_calls": json.dumps([CALL])},
            {"from": "observation", "value": "<image>Closer."},
            {"from": "gpt", "value": "A dog."},
        ],
    }
    for row in (in_api_form, by_path, trl, completed, sharegpt):
        rows, rest = load(written(tmp_path, [row]))
        assert shape(rows[0]) == TALK and rest is None
        assert rows[0].data["trained"] == [True, True] and rows[0].data["sampled"] == {}
    assert load(written(tmp_path, [in_api_form]))[0][0].data["tools"] == in_api_form["tools"]


def test_images_of_tables_are_bytes_structs_and_pil_images(tmp_path):
    messages = [{"role": "user", "content": "<image>a<image>"}, {"role": "assistant", "content": "b"}]
    pil = datasets.Dataset.from_list([{"messages": messages, "images": [picture(1), picture(2)]}])
    raw = datasets.Dataset.from_list([{"messages": messages, "images": [png(1), png(2)]}])
    struct = datasets.Dataset.from_list(
        [{"messages": messages, "images": [{"bytes": png(n), "path": None} for n in (1, 2)]}]
    )
    for table in (pil, raw, struct):
        table.to_parquet(tmp_path / "rows.parquet")
        assert shape(load(tmp_path / "rows.parquet")[0][0]) == [("user", 1, "a", 2), ("assistant", "b")]


def test_nulls_that_were_written_as_json_are_kept_and_those_of_columns_are_not(tmp_path):
    arguments = {"x": None, "y": [None, {"z": None}]}
    tool = {"name": "zoom", "parameters": {"properties": {"x": {"default": None}}}}

    def row(call: dict, tools: Any) -> dict:
        return {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""} | call],
            "tools": tools,
        }

    def read(rows) -> list:
        found = load(written(tmp_path, rows))[0]
        return [(task.prompt[1]["tool_calls"][0]["function"]["arguments"], task.data["tools"]) for task in found]

    whole = {"function": {"name": "zoom", "arguments": json.dumps(arguments)}}
    assert read([row({"tool_calls": [whole]}, json.dumps([tool]))]) == [(arguments, [tool])]
    assert read([row({"tool_calls": json.dumps([{"name": "zoom", "arguments": arguments}])}, [])]) == [(arguments, [])]
    table = [row({"tool_calls": [{"function": {"name": "f", "arguments": each}}]}, []) for each in ({"x": 1}, {"y": 2})]
    datasets.Dataset.from_list(table, on_mixed_types=None).to_parquet(tmp_path / "rows.parquet")
    rows = load(tmp_path / "rows.parquet")[0]
    assert [task.prompt[1]["tool_calls"][0]["function"]["arguments"] for task in rows] == [{"x": 1}, {"y": 2}]


@pytest.mark.parametrize("name", ["system", "system_prompt", "persona"])
def test_a_column_of_system_messages_is_the_first_message_of_rows_without_one(tmp_path, name):
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    own = [{"from": "system", "value": "own"}, *talk]
    rows = [{name: text, "conversations": each} for text, each in (("S", talk), ("", talk), (None, talk), ("S", own))]
    found = load(written(tmp_path, rows), columns={"system": name} if name == "persona" else {})[0]
    assert [shape(task)[:-2] for task in found] == [[("system", "S")], [], [], [("system", "own")]]


def test_function_call_messages_are_tool_calls(tmp_path):
    talk = [("human", "a"), ("function_call", json.dumps(CALL)), ("observation", "b"), ("gpt", "c")]
    row = {"conversations": [{"from": role, "value": text} for role, text in talk]}
    assert shape(load(written(tmp_path, [row]))[0][0]) == [
        ("user", "a"),
        ("assistant", CALL),
        ("tool", "b"),
        ("assistant", "c"),
    ]


def test_a_function_call_message_keeps_its_weight_and_its_reasoning(tmp_path):
    """It was trained although its weight was 0, and without its reasoning, unsaid."""
    talk = [("human", "a"), ("function_call", json.dumps(CALL)), ("observation", "b"), ("gpt", "c")]
    messages = [{"from": role, "value": text} for role, text in talk]
    messages[1] |= {"weight": 0, "reasoning_content": "why"}
    task = load(written(tmp_path, [{"conversations": messages}]))[0][0]
    assert task.data["trained"] == [False, True]
    assert task.prompt[1]["reasoning_content"] == "why" and task.prompt[1]["content"] == ""


def test_turns_and_weights_choose_the_responses_and_sampled_ids_are_kept_by_response(tmp_path):
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    row = {"messages": messages, "responses": [{"message": 3, "token_ids": [5, 6], "logprobs": [-0.1, -0.2]}]}
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes/episodes.jsonl").write_text(json.dumps(row))
    last = load(tmp_path / "episodes", turns="last")[0][0]
    assert last.data["trained"] == [False, True] and last.data["sampled"] == {1: [5, 6]}
    messages[3]["weight"] = 0
    task = load(written(tmp_path, [row]))[0][0]
    assert task.data["trained"] == [True, False] and "weight" not in task.prompt[3]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_response_with_loss_false_has_none_as_in_ms_swift(tmp_path, suffix):
    """It was trained, without a word where the first row has no such field."""
    ask, say = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    plain = [ask, say]
    masked = [ask, say | {"loss": False}, ask, say | {"loss": True}, ask, say | {"loss": 2.5}]
    path = written(tmp_path, [{"messages": plain}, {"messages": masked[:4]}, {"messages": masked}])
    if suffix == ".parquet":
        datasets.Dataset.from_list([{"messages": plain}, {"messages": masked[:4]}]).to_parquet(
            path := tmp_path / "a.parquet"
        )
    rows, _ = load(path)
    assert [rows[number].data["trained"] for number in range(2)] == [[True], [False, True]]
    assert rows.parts["main"].warnings == []
    if suffix == ".jsonl":  # a number may be a loss that was measured
        assert rows[2].data["trained"] == [False, True, True]


def test_the_responses_in_a_prompt_have_no_loss_beside_a_completion(tmp_path):
    """As in TRL: the rows of a preference or a multi-turn dataset would also train what others have said before."""
    ask, say = ({"role": role, "content": role} for role in ("user", "assistant"))
    rows = [
        {"prompt": [ask, say, ask], "completion": [say, ask, say]},
        {"prompt": [ask], "completion": [say]},
        {"prompt": [ask, say], "completion": [ask]},
    ]
    found = load(written(tmp_path, rows))[0]
    assert [found[number].data["trained"] for number in range(2)] == [[False, True, True], [True]]
    assert load(written(tmp_path, rows), turns="last")[0][0].data["trained"] == [False, False, True]
    with pytest.raises(RowError, match="no response has a loss"):
        found[2]


def test_a_text_of_a_question_and_one_of_its_answer_are_a_conversation(tmp_path):
    """As of GSM8K and of instructions: each of these rows was unreadable."""
    row = {"system": "S", "question": "<image>What?", "images": [uri(1)], "answer": "A dog.", "id": 7}
    table = written(tmp_path, [row, row | {"answer": ""}, row | {"question": None}])
    rows = load(table, columns={"prompt": "question", "completion": "answer"})[0]
    assert shape(rows[0]) == [("system", "S"), ("user", 1, "What?"), ("assistant", "A dog.")]
    assert rows[0].data["trained"] == [True] and rows.parts["main"].warnings == ["not read: columns id"]
    for number, problem in (
        (1, "there is no response to train on"),
        (2, "message 1, of the role assistant, follows system"),
    ):
        with pytest.raises(RowError, match=problem):
            rows[number]
    with pytest.raises(
        ValueError, match=r"there is no column of messages.* or both of `prompt COLUMN completion COLUMN`"
    ):
        load(table)


@pytest.mark.parametrize(
    "answer", ['{"from": "Paris", "to": "Rome"}', '{"content": "x"}', "[INST] and [/INST] are tags."]
)
def test_an_answer_may_be_json_or_speak_of_templates(answer, tmp_path):
    task = load(written(tmp_path, [{"prompt": "a", "completion": answer}]))[0][0]
    assert shape(task) == [("user", "a"), ("assistant", answer)]


def test_columns_of_messages_and_of_texts_exclude_each_other(tmp_path):
    table = written(tmp_path, [{"m": [], "q": "c", "a": "d"}])
    with pytest.raises(ValueError, match="must have messages, or prompt and completion, but it has both"):
        load(table, columns={"messages": "m", "prompt": "q", "completion": "a"})


def test_named_columns_of_texts_come_before_a_column_of_messages(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "q": "c", "a": "d"}
    table = written(tmp_path, [row])
    assert shape(load(table)[0][0]) == [("user", "a"), ("assistant", "b")]
    assert shape(load(table, columns={"prompt": "q", "completion": "a"})[0][0]) == [("user", "c"), ("assistant", "d")]


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "a"}]', "<|im_start|>user\na<|im_end|>\n"])
def test_messages_that_are_written_as_the_text_of_a_prompt_are_refused(text, tmp_path):
    """The model would read the marks of a chat template, or JSON, as what a user says."""
    with pytest.raises(RowError, match="the text of the user has messages written as a text"):
        load(written(tmp_path, [{"prompt": text, "completion": "b"}]))[0][0]


def test_the_responses_in_a_prompt_have_no_loss_beside_a_column_of_system_messages_either(tmp_path):
    """The system message moved all places by one: the last response of a prompt, such as a call, was trained."""
    ask, say = ({"role": role, "content": role} for role in ("user", "assistant"))
    sampled = [{"message": 3, "token_ids": [5], "logprobs": [-0.1]}]
    row = {"system": "S", "prompt": [ask, say], "completion": [ask, say], "responses": sampled}
    task = load(written(tmp_path, [row]))[0][0]
    assert [message["role"] for message in task.prompt] == ["system", "user", "assistant", "user", "assistant"]
    assert task.data["trained"] == [False, True] and task.data["sampled"] == {1: [5]}


def test_each_row_of_two_datasets_in_one_file_has_its_own_columns(tmp_path):
    """Of `image` and `images`, and of `system` and `system_prompt`, one was read: rows lost their image or system message."""
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [
        {"conversations": talk, "image": uri(1), "system": "S"},
        {"messages": talk, "images": [uri(2)], "system_prompt": "T"},
    ]
    assert [shape(task)[:2] for task in load(written(tmp_path, rows))[0]] == [
        [("system", "S"), ("user", 1, "a")],
        [("system", "T"), ("user", 2, "a")],
    ]


CALLS = [
    {"name": "f", "parameters": {"a": 1}},
    {"function": {"name": "f", "args": "{}"}},
    {"tool": "f", "arguments": {}},
]


@pytest.mark.parametrize("called", CALLS)
def test_a_call_whose_arguments_or_name_have_another_name_is_a_bad_row(tmp_path, called):
    """As Llama writes calls. Templates that write arguments one by one, such as Qwen3.5's, trained the call without them."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    told = [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(called)}]
    for row in ({"messages": talk}, {"conversations": told}):
        with pytest.raises(RowError, match="a call needs a name and arguments") as info:
            load(written(tmp_path, [row]))[0][0]
        assert info.value.reason == "unreadable"
    with pytest.raises(ValueError, match=r"row 0 .* a call needs a name and arguments"):
        load_tasks(Data(str(written(tmp_path, [{"prompt": [*talk, {"role": "tool", "content": "1"}]}])), seed=None))[0]


def test_a_call_without_arguments_is_none_of_another_form(tmp_path):
    bare = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": None}}, {"name": "f"}]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": bare}]
    assert len(load(written(tmp_path, [{"messages": talk}]))[0][0].prompt[1]["tool_calls"]) == 2


def test_functions_are_the_tools_of_a_row_with_function_calls(tmp_path):
    """Of OpenAI's earlier form, calls were trained without the functions that the prompt has to show."""
    call = {"role": "assistant", "content": None, "function_call": {"name": "zoom", "arguments": "{}"}}
    functions = [{"name": "zoom", "parameters": {"type": "object"}}]
    row = {"messages": [{"role": "user", "content": "a"}, call], "functions": functions}
    assert load(written(tmp_path, [row]))[0][0].data["tools"] == functions


def test_functions_beside_messages_without_calls_are_not_read(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert not load(written(tmp_path, [{"messages": talk, "functions": "def f(): ..."}]))[0][0].data["tools"]


def test_a_call_without_arguments_may_have_other_fields(tmp_path):
    call = {"name": "f", "call_id": "c1", "strict": False}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert load(written(tmp_path, [{"messages": talk}]))[0][0].prompt[1]["tool_calls"]


def test_a_column_of_images_that_the_messages_show_already_is_refused(tmp_path):
    """The images were shown a second time, before the next question."""
    shown = [{"type": "image_url", "image_url": {"url": uri(1)}}, {"type": "text", "text": "a"}]
    row = {"messages": [{"role": role, "content": text} for role, text in [("user", shown), SAY, ASK, SAY]]}
    with pytest.raises(RowError, match="1 images for 0 image parts without a source") as info:
        load(written(tmp_path, [row | {"images": [uri(1)]}]))[0][0]
    assert info.value.reason == "images"


def row(*talk, **columns):
    return {"messages": [{"role": role, "content": text} for role, text in talk], "images": None} | columns


ASK, SAY = ("user", "a"), ("assistant", "b")
IGNORED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
LACKING = [{"content": None}, {"text": "A"}, {"content": None, "refusal": "No."}, {"content": None, "tool_calls": []}]
BAD = {
    "roles": [row(*talk) for talk in ([SAY], [ASK], [ASK, SAY, SAY], [("tool", "a"), SAY], [ASK, ("critic", "b")])],
    "marks": [
        row(("user", "<image><image>a"), SAY, images=["1.png"]),
        row(("user", "<video>a"), SAY, videos=["1.mp4"]),
        row(("user", "<image>a <audio>"), SAY, images=["1.png"], audios=["1.wav"]),
        row(ASK, SAY, ("tool", "<video>"), SAY, video="1.mp4"),
    ],
    "images": [row(ASK, SAY, images=["none.png"]), row(("user", "<image>"), SAY, images=["1.png", "1.png"])],
    "untrained": [{"messages": IGNORED, "images": None}],
    "unreadable": [
        *({"messages": each, "images": None} for each in ("no JSON", 7)),
        *({"messages": [IGNORED[0], IGNORED[1] | {"weight": weight}], "images": None} for weight in (0.5, "0", -1)),
        *({"messages": [IGNORED[0], {"role": "assistant"} | each], "images": None} for each in LACKING),
        {"messages": [{"role": "user", "text": "Q"}, {"role": "assistant", "content": "A"}], "images": None},
        {"messages": [{"role": "user", "content": "Q", "images": ["1.png"]}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Q", "image": "1.png"}, {"from": "gpt", "value": "A"}]},
    ],
}


@pytest.mark.parametrize(("reason", "bad"), [(reason, each) for reason, rows in BAD.items() for each in rows])
def test_a_bad_row_has_a_reason_and_names_its_index(tmp_path, reason, bad):
    (tmp_path / "1.png").write_bytes(png(1))
    rows, _ = load(written(tmp_path, [bad, bad]))
    with pytest.raises(RowError, match=r"row 1 of .*rows.jsonl") as error:
        rows[1]
    assert error.value.reason == reason


def test_datasets_are_mixed_by_rows_and_epochs_and_rows_are_held_out(tmp_path):
    path = written(tmp_path, [row(ASK, SAY)] * 10)
    data = {"a": Conversations(path=str(path), epochs=2.0), "b": Conversations(path=str(path), held_out=5, epochs=2.0)}
    rows, rest = load_conversations(Config(sft=SFT(data=data)))
    drawn = [rows.draw(number).part for number in range(30)]
    assert drawn.count("a") == 20 and len(rest) == 5 and {task.part for task in rest} == {"b"}


@pytest.mark.parametrize(
    ("message", "columns", "note"),
    [
        ({}, {}, []),
        ({"weight": 1, "name": "Ann"}, {"images": [], "tools": None, "system": "Be kind."}, []),
        ({}, {"responses": [], "functions": []}, []),
        ({"thought": "Hm.", "weight": 1}, {"id": 7}, ["not read: columns id; fields of messages thought"]),
        ({}, {"context": "Rome.", "prompt": "Hi", "video": None}, ["not read: columns context, prompt, video"]),
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_what_is_not_read_is_named(tmp_path, message, columns, note, is_text):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"} | message]
    path = written(tmp_path, [columns | {"messages": json.dumps(messages) if is_text else messages}])
    assert load(path)[0].parts["main"].warnings == note


@pytest.mark.parametrize("cell", ["no list", "[" * 100_000])
def test_a_bad_first_row_does_not_hide_the_columns_that_are_not_read(tmp_path, cell):
    path = written(tmp_path, [{"messages": cell, "id": 1}, *[row("Hi", "Ho")] * 2])
    assert load(path)[0].parts["main"].warnings == ["not read: columns id"]


def test_a_dataset_without_messages_is_refused_with_its_columns(tmp_path):
    path = written(tmp_path, [{"dialog": row(ASK, SAY)["messages"]}])
    with pytest.raises(ValueError, match=r"sft.data.main.columns: there is no column of messages, .* are: dialog"):
        load(path)
    assert shape(load(path, columns={"messages": "dialog"})[0][0]) == [ASK, SAY]
