"""OpenAI's Responses API: its requests, responses and streams. The endpoint keeps no conversation: each request has all of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.openai_api import (
    REFUSED,
    arguments_text,
    function_tool,
    openai_error,
    overridden_fields,
    repeated_call,
    token_logprobs,
)
from vlmrl.gateway.request_body import (
    FORM_REMEDY,
    ParsedRequest,
    check_depth,
    content_field,
    count_field,
    flag_field,
    id_field,
    list_field,
    model_field,
    object_field,
    refuse,
    refuse_fields,
    seed_field,
    stop_field,
    text_field,
)
from vlmrl.gateway.request_images import RequestImages
from vlmrl.types import Message

_KEPT = "the endpoint keeps no conversation, so each request needs all of it in input"
REFUSED_BY_RESPONSES: dict[str, tuple[tuple[Any, ...], str]] = {
    # Clients send these beside the API's own fields, as OpenAI's SDK does with those of extra_body.
    **REFUSED,
    "previous_response_id": ((), _KEPT),
    "conversation": ((), _KEPT),
    "prompt": ((), "send its text in instructions or input"),
    "background": ((False,), "wait for the response"),
    "truncation": (("disabled",), "shorten input before it is sent"),
    "top_logprobs": ((0,), "use include, for those of the sampled tokens"),
    "context_management": (([],), "shorten input before it is sent"),
}
READ = {"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "include", "text"}
READ |= {"stop", "seed"}
WITHOUT_EFFECT = {"metadata", "store", "user", "service_tier", "safety_identifier", "stream_options", "max_tool_calls"}
WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls"}
LOGPROBS = "message.output_text.logprobs"
TEXTS = ("input_text", "output_text", "text")


def read_responses_request(body: dict[str, Any], images: RequestImages) -> ParsedRequest:
    """The request of a response, its new images not loaded yet. Raises ChatError."""
    refuse_fields(body, REFUSED_BY_RESPONSES)
    form = object_field(body.get("text") or {}, "text").get("format") or {"type": "text"}
    if form != {"type": "text"}:
        refuse("text.format", "left out", form, FORM_REMEDY)
    chat = ChatRequest(
        messages=_conversation(body, images),
        tools=_tools(body.get("tools")),
        max_tokens=count_field(body.get("max_output_tokens"), "max_output_tokens"),
        stop=stop_field(body.get("stop"), "stop"),
        seed=seed_field(body.get("seed")),
        reads_calls=body.get("tool_choice") != "none",
        overridden=overridden_fields(body, READ | WITHOUT_EFFECT | REFUSED_BY_RESPONSES.keys()),
    )
    return ParsedRequest(
        chat,
        model=model_field(body.get("model")),
        stream=flag_field(body.get("stream"), "stream"),
        logprobs=LOGPROBS in list_field(body.get("include") or [], "include"),
    )


def _conversation(body: dict[str, Any], images: RequestImages) -> list[Message]:
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_field(body["instructions"], "instructions")})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_field(given, "input")
    if not items:
        refuse("input", "a text, or one item or more", given)
    for index, each in enumerate(items):
        where = f"input[{index}]"
        item = object_field(each, where)
        kind, role = item.get("type") or "message", item.get("role")
        if kind == "function_call_output":
            shown = content_field(item.get("output"), f"{where}.output", _part, images)
            call = id_field(item.get("call_id"), f"{where}.call_id")
            messages.append({"role": "tool", "content": shown, "tool_call_id": call})
        elif kind != "message" or role == "assistant":
            _add_to_response(messages, kind, item, where)
        elif role in ("user", "system", "developer"):
            shown = content_field(item.get("content"), f"{where}.content", _part, images if role == "user" else None)
            messages.append({"role": "system" if role == "developer" else role, "content": shown})
        else:
            refuse(f"{where}.role", "user, assistant, system or developer", role)
    return messages


def _add_to_response(messages: list[Message], kind: str, item: dict[str, Any], where: str) -> None:
    """Add an item of a response that the client repeats. A response has reasoning, then its text, then its calls: an item that cannot
    follow what is there begins another one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or kind == "reasoning" or (kind == "message" and (last["content"] or "tool_calls" in last)):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "message":
        last["content"] = content_field(item.get("content"), f"{where}.content", _part, None)
    elif kind == "function_call":
        call_id = id_field(item.get("call_id"), f"{where}.call_id")
        last.setdefault("tool_calls", []).append(repeated_call(call_id, item, where))
    elif kind == "reasoning":
        parts = list_field(item.get("content") or item.get("summary") or [], f"{where}.content")
        texts = [text_field(object_field(part, where).get("text"), f"{where}.content") for part in parts]
        if any(texts):
            last["reasoning_content"] = "".join(texts)
    else:
        refuse(f"{where}.type", "message, function_call, function_call_output or reasoning", kind)


def _part(part: dict[str, Any], where: str, images: RequestImages | None) -> dict[str, Any]:
    kind = part.get("type")
    if kind in TEXTS or kind == "refusal":
        field = "refusal" if kind == "refusal" else "text"
        return {"type": "text", "text": text_field(part.get(field), f"{where}.{field}")}
    if kind != "input_image" or images is None:
        refuse(f"{where}.type", "a text" if images is None else "input_text or input_image", kind)
    field = f"{where}.image_url"
    return {"type": "image", "image": images.read(text_field(part.get("image_url"), field), field)}


def _tools(value: Any) -> list[dict[str, Any]]:
    """The tools in the form of chat completions."""
    tools = [object_field(tool, f"tools[{i}]") for i, tool in enumerate(list_field(value or [], "tools"))]
    check_depth(tools, "tools")
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            refuse(f"tools[{index}].type", "function", tool.get("type"), "the agent runs its tools itself")
    keys = ("name", "description", "parameters")
    schemas = [{key: tool[key] for key in keys if tool.get(key) is not None} for tool in tools]
    return [function_tool(schema, f"tools[{i}]") for i, schema in enumerate(schemas)]


def responses_response(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    return _ended(_begun(parsed, response), parsed, response)


def _ended(begun: dict[str, Any], parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    cut = response.finish_reason == "length"
    sampled = len(response.token_ids)
    return {
        **begun,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(parsed, response),
        "usage": {
            "input_tokens": response.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.prompt_tokens + sampled,
        },
    }


def _begun(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    """A response before its output."""
    return {
        "id": response.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": parsed.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _items(parsed: ParsedRequest, response: ChatResponse) -> list[dict[str, Any]]:
    """The reasoning, the text and the calls, each an item. A response without calls has a text, be it empty."""
    status = "incomplete" if response.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if response.reasoning:
        thought = {"type": "reasoning_text", "text": response.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{response.id}", "summary": [], "content": [thought]})
    if response.content or not response.tool_calls:
        logprobs = token_logprobs(response) if parsed.logprobs else []
        text = {"type": "output_text", "text": response.content, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{response.id}", "role": "assistant", "content": [text]})
    for call in response.tool_calls:
        function = {"call_id": call.id, "name": call.name, "arguments": arguments_text(call)}
        items.append({"type": "function_call", "id": f"fc_{call.id}", **function})
    return [{**item, "status": status} for item in items]


def responses_stream(parsed: ParsedRequest, response: ChatResponse) -> Iterator[bytes]:
    """The events of a streamed response."""
    for number, (kind, fields) in enumerate(_events(parsed, response)):
        yield _event({"type": kind, "sequence_number": number, **fields})


def _events(parsed: ParsedRequest, response: ChatResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _begun(parsed, response)
    whole = _ended(begun, parsed, response)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        place = {"output_index": index}
        yield "response.output_item.added", {**place, "item": {**item, **empty, "status": "in_progress"}}
        for kind, fields in _deltas(item):
            yield f"response.{kind}", {**place, "item_id": item["id"], **fields}
        yield "response.output_item.done", {**place, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _deltas(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events that add an item's content: its call's arguments, or its one part."""
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    place, kind = {"content_index": 0}, part["type"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": ""} | ({"logprobs": []} if logprobs else {})
    yield "content_part.added", {**place, "part": empty}
    yield f"{kind}.delta", {**place, "delta": part["text"], **logprobs}
    yield f"{kind}.done", {**place, "text": part["text"], **logprobs}
    yield "content_part.done", {**place, "part": part}


def responses_error_event(error: ChatError) -> bytes:
    """An error after the stream has begun: as the API's event, and with the object at which OpenAI's SDK raises."""
    described = openai_error(error)
    return _event({"sequence_number": 0, **described["error"], **described, "type": "error"})


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
