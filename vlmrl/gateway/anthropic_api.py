"""Anthropic's messages: their requests, responses, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
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
    one_text,
    refuse,
    refuse_fields,
    stop_field,
    text_field,
)
from vlmrl.gateway.request_images import RequestImages
from vlmrl.types import Message

REFUSED_BY_MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "mcp_servers": (([],), "the agent calls its tools itself"),
    "container": ((), "the agent calls its tools itself"),
    "output_format": ((), FORM_REMEDY),
    "thread": ((), "the endpoint keeps no conversation, so each request needs all of its messages"),
    "compaction": ((), "ask for the summary in a message"),
}
OVERRIDDEN_BY_MESSAGES = ("temperature", "top_p", "top_k", "thinking", "output_config")
READ = {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"}
WITHOUT_EFFECT = {"metadata", "service_tier", "betas", "context_management", "cache_control", "inference_geo"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def read_anthropic_request(body: dict[str, Any], images: RequestImages) -> ParsedRequest:
    """The request of a message, its new images not loaded yet. Raises ChatError."""
    refuse_fields(body, REFUSED_BY_MESSAGES)
    output = object_field(body.get("output_config") or {}, "output_config")
    if output.get("format") is not None:
        refuse("output_config.format", "left out", output["format"], FORM_REMEDY)
    choice = object_field(body.get("tool_choice") or {}, "tool_choice")
    chat = ChatRequest(
        messages=_conversation(body, images),
        tools=_tools(body.get("tools")),
        max_tokens=count_field(body.get("max_tokens"), "max_tokens"),
        stop=stop_field(body.get("stop_sequences"), "stop_sequences"),
        reads_calls=choice.get("type") != "none",
        overridden=_overridden(body, choice),
    )
    return ParsedRequest(chat, model_field(body.get("model")), stream=flag_field(body.get("stream"), "stream"))


def _overridden(body: dict[str, Any], choice: dict[str, Any]) -> tuple[str, ...]:
    names = [name for name in OVERRIDDEN_BY_MESSAGES if body.get(name) is not None]
    if choice.get("type") not in (None, "auto", "none"):
        names.append("tool_choice")
    if choice.get("disable_parallel_tool_use"):
        names.append("parallel_tool_calls")
    if body.keys() - READ - WITHOUT_EFFECT - REFUSED_BY_MESSAGES.keys() - set(OVERRIDDEN_BY_MESSAGES):
        names.append("unknown")
    return tuple(names)


def _conversation(body: dict[str, Any], images: RequestImages) -> list[Message]:
    messages: list[Message] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": content_field(system, "system", _part, None)})
    given = list_field(body.get("messages"), "messages")
    for index, each in enumerate(given):
        where = f"messages[{index}]"
        message = object_field(each, where)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            messages += _user(content, f"{where}.content", images)
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content"))
        elif role == "system":
            messages.append({"role": "system", "content": content_field(content, f"{where}.content", _part, None)})
        else:
            refuse(f"{where}.role", "user, assistant or system", role)
    if not given or given[-1]["role"] == "assistant":
        refuse("messages", "a conversation that ends with the user", given[-1:], "a response is a message of its own")
    return messages


def _user(content: Any, where: str, images: RequestImages) -> list[Message]:
    """A user's blocks: each tool result as a tool message, and what is before, between and after them as user messages."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    blocks = [
        (object_field(each, f"{where}[{i}]"), f"{where}[{i}]") for i, each in enumerate(list_field(content, where))
    ]
    messages: list[Message] = []
    for is_result, run in groupby(blocks, lambda pair: pair[0].get("type") == "tool_result"):
        if is_result:
            messages += [_result(block, place, images) for block, place in run]
        else:
            messages.append(
                {"role": "user", "content": one_text([_part(block, place, images) for block, place in run])}
            )
    return messages or [{"role": "user", "content": ""}]


def _result(block: dict[str, Any], where: str, images: RequestImages) -> Message:
    content = block.get("content")
    shown = "" if content is None else content_field(content, f"{where}.content", _part, images)
    call = id_field(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "content": shown, "tool_call_id": call}


def _part(block: dict[str, Any], where: str, images: RequestImages | None) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": text_field(block.get("text"), f"{where}.text")}
    if kind != "image" or images is None:
        refuse(f"{where}.type", "text" if images is None else "text, image or tool_result", kind)
    source, field = object_field(block.get("source"), f"{where}.source"), f"{where}.source"
    if source.get("type") == "base64":
        data = text_field(source.get("data"), f"{field}.data")
        return {"type": "image", "image": images.embedded(data, f"{field}.data")}
    if source.get("type") != "url":
        refuse(f"{field}.type", "base64 or url", source.get("type"))
    return {"type": "image", "image": images.read(text_field(source.get("url"), f"{field}.url"), f"{field}.url")}


def _assistant(content: Any, where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    if isinstance(content, str):
        return {**message, "content": content}
    texts, reasoning, calls = [], [], []
    for index, each in enumerate(list_field(content, where)):
        block, place = object_field(each, f"{where}[{index}]"), f"{where}[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(text_field(block.get("text"), f"{place}.text"))
        elif kind == "thinking":
            reasoning.append(text_field(block.get("thinking"), f"{place}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        else:
            refuse(f"{place}.type", "text, thinking or tool_use", kind)
    message["content"] = "".join(texts)
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = object_field(block.get("input"), f"{where}.input")
    check_depth(arguments, f"{where}.input")
    name = text_field(block.get("name"), f"{where}.name")
    call = id_field(block.get("id"), f"{where}.id")
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(value: Any) -> list[dict[str, Any]]:
    """The tools in OpenAI's form."""
    tools = list_field(value or [], "tools")
    check_depth(tools, "tools")
    return [_tool(object_field(tool, f"tools[{i}]"), f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in (None, "custom"):
        refuse(
            f"{where}.type", "custom", tool["type"], "the agent runs its tools itself, so each needs an input_schema"
        )
    function = {"name": text_field(tool.get("name"), f"{where}.name")}
    if tool.get("description") is not None:
        function["description"] = text_field(tool["description"], f"{where}.description")
    schema = object_field(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": {**function, "parameters": schema}}


def anthropic_response(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    return {**_head(parsed, response), "content": _blocks(response), **_stop(response), "usage": _usage(response)}


def anthropic_stream(parsed: ParsedRequest, response: ChatResponse) -> Iterator[bytes]:
    """The events of a streamed response."""
    usage = {**_usage(response), "output_tokens": 0}
    start = {**_head(parsed, response), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for index, block in enumerate(_blocks(response)):
        empty, deltas = _as_deltas(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(response), usage=_usage(response))
    yield _event("message_stop")


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its content, and the deltas that add it."""
    kind = block["type"]
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def anthropic_error(error: ChatError) -> dict[str, Any]:
    """The body of an error. Anthropic's own have no ``code``."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error", 413: "request_too_large"}
    kinds |= {408: "timeout_error", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    described: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code}
    if error.code == "thread":  # upon this, the SDK's tool_runner sends whole conversations
        described["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": described}


def anthropic_error_event(error: ChatError) -> bytes:
    """An error after the stream has begun."""
    return b"event: error\ndata: " + json.dumps(anthropic_error(error)).encode() + b"\n\n"


def _event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **data}).encode() + b"\n\n"


def _head(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    return {"id": response.id, "type": "message", "role": "assistant", "model": parsed.model}


def _blocks(response: ChatResponse) -> list[dict[str, Any]]:
    """The response's content. The signature of thoughts is a name, and not checked: any client may change them, but some send those
    without a signature back as a message of the user."""
    blocks: list[dict[str, Any]] = []
    if response.reasoning:
        blocks.append({"type": "thinking", "thinking": response.reasoning, "signature": response.id})
    if response.content:
        blocks.append({"type": "text", "text": response.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in response.tool_calls
    ]
    return blocks


def _stop(response: ChatResponse) -> dict[str, Any]:
    """Why the response ended."""
    if response.finish_reason == "stop" and response.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": response.stop}
    return {"stop_reason": STOP_REASONS[response.finish_reason], "stop_sequence": None}


def _usage(response: ChatResponse) -> dict[str, int]:
    return {"input_tokens": response.prompt_tokens, "output_tokens": len(response.token_ids)}
