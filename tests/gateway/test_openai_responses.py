"""OpenAI's Responses API: items as messages, what is refused by name, responses and streams, and conversations across APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from testing.agent_episodes import ZOOM, agent_episode, zoom_call
from testing.episodes import new_store
from testing.gateway import PATIENCE, Gate, png, serving, turns_of, uri

from vlmrl.config import Gateway
from vlmrl.engine.base import EngineError
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse, IssuedCall
from vlmrl.gateway.openai_api import REFUSED, read_openai_request, token_logprobs
from vlmrl.gateway.openai_responses_api import (
    REFUSED_BY_RESPONSES,
    read_responses_request,
    responses_error_event,
    responses_response,
    responses_stream,
)
from vlmrl.gateway.request_body import ParsedRequest
from vlmrl.gateway.request_images import RequestImages

HELLO = {"model": "m", "input": "hello"}
TOOL = {"type": "function", "strict": True, **ZOOM["function"]}
PATH = "/v1/responses"


def read(**body: Any) -> ChatRequest:
    return read_responses_request({"input": "hello"} | body, RequestImages(new_store(), Gateway())).chat


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def said(text: str) -> dict[str, Any]:
    return item("message", role="assistant", id="msg_1", status="completed", content=[item("output_text", text=text)])


def called(number: int) -> dict[str, Any]:
    return item("function_call", id=f"fc_{number}", call_id=f"c{number}", name="zoom", arguments=f'{{"k": {number}}}')


def thought(text: str) -> dict[str, Any]:
    return item("reasoning", id="rs_1", summary=[], content=[item("reasoning_text", text=text)])


def test_items_are_the_messages_of_chat_completions():
    """Reasoning, text and calls of one response are one message; what cannot follow begins another one."""
    items = [
        {"role": "developer", "content": "Look."},
        {"role": "user", "content": [item("input_text", text="a"), item("input_text", text=" b")]},
        thought("hm"),
        said("Two."),
        called(1),
        called(2),
        item("function_call_output", call_id="c1", output="one"),
        item("function_call_output", call_id="c2", output=[item("input_text", text="two")]),
        called(3),
        item("function_call_output", call_id="c3", output=""),
        thought("so"),
        said("Four."),
        item("reasoning", id="rs_2", summary=[item("summary_text", text="fi"), item("summary_text", text="ve")]),
        {"role": "assistant", "content": "Five."},
        item("reasoning", id="rs_3", summary=[]),  # as langchain-openai makes of a stream's
        said("Six."),
        {"role": "user", "content": "And?"},
        called(4),
        said("Seven."),
        {"role": "assistant", "content": [item("refusal", refusal="No.")]},
    ]
    calls = [
        {"id": f"c{k}", "type": "function", "function": {"name": "zoom", "arguments": {"k": k}}} for k in (1, 2, 3, 4)
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Look."},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "hm", "tool_calls": calls[:2]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:3]},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "so"},
        {"role": "assistant", "content": "Five.", "reasoning_content": "five"},
        {"role": "assistant", "content": "Six."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "", "tool_calls": calls[3:]},
        {"role": "assistant", "content": "Seven."},
        {"role": "assistant", "content": "No."},
    ]
    mine = read(instructions="Be brief.", input=items, tools=[TOOL], max_output_tokens=7, tool_choice="none")
    chat = read_openai_request(
        {"messages": messages, "tools": [ZOOM], "max_tokens": 7, "tool_choice": "none"},
        RequestImages(new_store(), Gateway()),
    ).chat
    assert mine == chat and not mine.overridden


def test_what_is_in_place_of_the_runs_settings_is_counted():
    sent = {"temperature": 1.0, "reasoning": {"effort": "low"}, "parallel_tool_calls": False, "tool_choice": "required"}
    assert read(**sent).overridden == ("temperature", "reasoning", "tool_choice", "parallel_tool_calls")
    assert read(store=False, include=["reasoning.encrypted_content"], text={"verbosity": "low"}).overridden == ()
    assert read(future=1).overridden == ("unknown",)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *(({name: "x"}, name) for name in {**REFUSED, **REFUSED_BY_RESPONSES}),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [item("item_reference", id="msg_1")]}, "input[0].type"),
        ({"input": [item("computer_call", role="assistant")]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [item("input_file", file_id="f")]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [item("input_image", file_id="f")]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "system", "content": [item("input_image", image_url="x")]}]}, "input[0].content[0].type"),
        ({"input": [item("function_call_output", output="x")]}, "input[0].call_id"),
        ({"input": [item("function_call", call_id="c", name="f", arguments="{")]}, "input[0].arguments"),
        ({"input": [item("reasoning", content=[{"text": 3}])]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "parameters": {}}]}, "tools[1].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
    ],
)
def test_what_a_run_cannot_follow_is_refused_by_name(body, field):
    with pytest.raises(ChatError) as raised:
        read(**body)
    assert (raised.value.status, raised.value.code) == (400, field)


def test_what_changes_nothing_is_accepted():
    read(background=False, truncation="disabled", top_logprobs=0, previous_response_id=None, context_management=[])


def test_fields_beside_those_of_the_api_are_read_as_in_chat_completions():
    """Clients send them by `extra_body`: inference servers take them."""
    sent = {"stop": ["a", "b"], "seed": 7, "n": 1, "top_k": 1, "chat_template_kwargs": {"enable_thinking": False}}
    chat = read_openai_request(
        {"messages": [{"role": "user", "content": "hello"}], **sent}, RequestImages(new_store(), Gateway())
    ).chat
    assert read(**sent) == chat and (chat.stop, chat.seed) == (("a", "b"), 7)
    assert chat.overridden == ("top_k", "chat_template_kwargs")


def test_of_a_tool_its_schema_is_read():
    assert read(tools=[TOOL | {"description": None, "defer_loading": False}]).tools == [
        {"type": "function", "function": {key: ZOOM["function"][key] for key in ("name", "parameters")}}
    ]
    with pytest.raises(ChatError, match="tools must not be nested"):
        read(tools=[TOOL | {"parameters": json.loads('{"a":' * 200 + "{}" + "}" * 200)}])


def sampled(content: str = "Two.", finish: Any = "tool_calls", reasoning: str = "hm", calls: int = 2) -> ChatResponse:
    issued = tuple(IssuedCall(f"c{k}", "zoom", {"k": k}) for k in range(calls))
    return ChatResponse("r", content, reasoning, issued, finish, [5, 6], ["a", "b"], [-0.5, -0.25], 7)


def test_a_stream_adds_each_item_from_nothing_and_ends_in_the_whole_response():
    parsed = ParsedRequest(ChatRequest([]), "m", stream=True, logprobs=True)
    whole = responses_response(parsed, sampled())
    events = [
        json.loads(each.partition(b"data: ")[2])
        for each in b"".join(responses_stream(parsed, sampled())).split(b"\n\n")[:-1]
    ]
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    begun, going, *middle, last = events
    empty = whole | {"status": "in_progress", "output": [], "usage": None}
    assert (begun["response"], going["response"], last["response"]) == (empty, empty, whole)
    ids = [each["id"] for each in whole["output"]]
    assert ids == ["rs_r", "msg_r", "fc_c0", "fc_c1"] and whole["created_at"] > 0
    built: list[Any] = []
    for event in middle:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(built) and event["item"]["status"] == "in_progress"
            built.append(event["item"])
        elif kind == "output_item.done":
            assert event["item"] == built[index] | {"status": "completed"} == whole["output"][index]
        else:
            assert event["item_id"] == ids[index]
            part = built[index]["content"][0] if built[index].get("content") else None
            if kind == "content_part.added":
                built[index]["content"].append(event["part"])
            elif kind == "function_call_arguments.delta":
                built[index]["arguments"] += event["delta"]
            elif kind == "function_call_arguments.done":
                assert {key: event[key] for key in ("name", "arguments")}.items() <= built[index].items()
            elif kind == "content_part.done":
                assert event["part"] == part
            elif kind.endswith("_text.delta"):
                assert kind == f"{part['type']}.delta"
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            else:
                assert kind == f"{part['type']}.done" and event["text"] == part["text"]
    assert built[1]["content"][0]["logprobs"] == token_logprobs(sampled())
    assert whole["usage"]["total_tokens"] == 9


def test_logprobs_are_sent_if_asked_for_and_a_response_without_calls_has_a_text():
    one = sampled("", "length", reasoning="", calls=0)
    for wanted in (False, True):
        include = ["message.output_text.logprobs"] if wanted else ["reasoning.encrypted_content"]
        body = {"input": "hello", "include": include}
        parsed = read_responses_request(body, RequestImages(new_store(), Gateway()))
        (message,) = responses_response(parsed, one)["output"]
        assert message["status"] == "incomplete"
        (part,) = message["content"]
        assert part["text"] == "" and len(part["logprobs"]) == (2 if wanted else 0)


def test_the_event_of_an_error_has_its_fields_and_the_object_at_which_the_sdk_raises():
    _, _, data = responses_error_event(ChatError(503, "engine", "gone")).partition(b"data: ")
    event = json.loads(data)
    fields = {"message": "gone", "type": "server_error", "param": None, "code": "engine"}
    assert event["error"] == fields
    assert event == {**fields, "error": fields, "sequence_number": 0, "type": "error"}


@pytest.mark.slow
def test_a_response_has_its_parts_and_a_stream_ends_in_it():
    text = f"<think>hm</think>Both.{zoom_call(1)}\n{zoom_call(2)}"
    with serving(agent_episode([text, text]), agent_episode(["four"])) as served:
        asked = HELLO | {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
        whole = served.post(PATH, asked).json()
        openai = served.client.openai()
        events = list(openai.responses.create(**asked, stream=True))
        with served.clients[1].openai().responses.stream(**HELLO) as stream:
            plain = stream.get_final_response()
    assert whole["object"] == "response" and whole["status"] == "completed" and whole["model"] == "m"
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [item("reasoning_text", text="hm")]
    (part,) = message["content"]
    assert part["text"] == "Both." and message["status"] == "completed"
    assert [each["name"] for each in (first, second)] == ["zoom", "zoom"] and first["call_id"] != second["call_id"]
    assert json.loads(second["arguments"]) == {"k": 2}
    assert whole["usage"]["output_tokens"] == len(part["logprobs"]) > 0  # of all sampled tokens
    last = events[-1].response.to_dict()
    changing = ("id", "created_at", "output")
    assert {key: value for key, value in last.items() if key not in changing} == {
        key: value for key, value in whole.items() if key not in changing
    }
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert arguments == [first["arguments"], second["arguments"]]
    texts = [event.delta for event in events if event.type.endswith("_text.delta")]
    assert texts == ["hm", "Both."]
    assert plain.output_text == "four" and plain.status == "completed"


@pytest.mark.slow
def test_a_cut_response_is_incomplete():
    with serving(agent_episode(["a long answer", "a long answer"])) as served:
        openai = served.client.openai()
        response = openai.responses.create(**HELLO, max_output_tokens=3)
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        events = list(openai.responses.create(**HELLO, max_output_tokens=3, stream=True))
        assert events[-1].type == "response.incomplete" and response.output_text == "a lo"


@pytest.mark.slow
def test_a_conversation_goes_on_in_the_other_api():
    """The record knows no API: a request continues a response whichever API sampled it."""
    episode = agent_episode([zoom_call(1), "red", "sure"])
    with serving(episode) as served:
        image = item("input_image", image_url=uri(png()), detail="auto")
        asked: list[Any] = [{"role": "user", "content": [image, item("input_text", text="what?")]}]
        openai = served.client.openai()
        first = openai.responses.create(model="m", input=asked, tools=[TOOL])
        (call,) = first.output
        answer = item("function_call_output", call_id=call.call_id, output=[image])
        second = openai.responses.create(model="m", input=[*asked, *first.output, answer], tools=[TOOL])
        part = {"type": "image_url", "image_url": {"url": uri(png())}}
        function = {"name": call.name, "arguments": call.arguments}
        messages = [
            {"role": "user", "content": [part, {"type": "text", "text": "what?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": [part]},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "Sure?"},
        ]
        third = openai.chat.completions.create(model="m", messages=messages, tools=[ZOOM])
        assert (second.output_text, third.choices[0].message.content) == ("red", "sure")
        turns = turns_of(served, episode)
    assert [turn.received.continues for turn in turns] == [None, 0, 1]
    assert [len(turn.media) for turn in turns] == [1, 1, 0]


@pytest.mark.slow
def test_errors_have_openais_form_and_end_a_stream_that_has_begun():
    openai = pytest.importorskip("openai")

    gate = Gate()

    async def fail(request: Any, turn: int) -> str:
        await gate(request, turn)
        raise EngineError("the engine is gone")

    with serving(agent_episode(fail), agent_episode(["a"], max_turns=1), heartbeat=0.01) as served:
        client = served.clients[1].openai()
        client.responses.create(**HELLO)
        with pytest.raises(openai.BadRequestError, match="has had 1 requests"):
            client.responses.create(**HELLO)
        stream = served.client.openai().responses.create(**HELLO, stream=True)  # it begins with a heartbeat
        served.run_loop.wait(gate.open(), PATIENCE)
        with pytest.raises(openai.APIError, match="the engine is gone"):
            list(stream)
