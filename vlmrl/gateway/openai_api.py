"""OpenAI's chat completions: their requests, responses, streams and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Set
from typing import Any

from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse, IssuedCall
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
from vlmrl.utils.json_files import strict_json

_CONSTRAINTS = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "structural_tag",
]
_DISTRIBUTION = "the trainer knows only the run's own sampling"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send one request for each response"),
    "best_of": ((1,), "send one request for each response"),
    "use_beam_search": ((False,), _DISTRIBUTION),
    "response_format": (({"type": "text"},), FORM_REMEDY),
    **dict.fromkeys(_CONSTRAINTS, ((), FORM_REMEDY)),
    "presence_penalty": ((0,), _DISTRIBUTION),
    "frequency_penalty": ((0,), _DISTRIBUTION),
    "repetition_penalty": ((1,), _DISTRIBUTION),
    "logit_bias": (({},), _DISTRIBUTION),
    "bad_words": (([],), _DISTRIBUTION),
    "stop_token_ids": (([],), "use stop"),
    "allowed_token_ids": (([],), _DISTRIBUTION),
    "logits_processors": (([],), _DISTRIBUTION),
    "ignore_eos": ((False,), _DISTRIBUTION),
    "min_tokens": ((0,), _DISTRIBUTION),
    "top_logprobs": ((0,), "use logprobs, of the sampled tokens"),
    "prompt_logprobs": ((0, False), "use logprobs, of the sampled tokens"),
    "echo": ((False,), "the prompt is the request's own messages"),
    "audio": ((), "the endpoint has text and images"),
    "modalities": ((["text"],), "the endpoint answers with text"),
    "functions": (([],), "use tools"),
    "function_call": ((), "use tool_choice"),
    "web_search_options": ((), "give the agent a tool that searches"),
    "continue_final_message": ((False,), "a response is a message of its own"),
    "chat_template": ((), "set model.chat_template of the run"),
}
"""Fields that are refused, each with the values that are accepted since they change nothing, and what to do instead."""

OVERRIDDEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "reasoning_effort",
    "reasoning",
    "verbosity",
    "chat_template_kwargs",
)
"""Fields in place of which the run's settings are used."""

READ = {"messages", "model", "tools", "tool_choice", "parallel_tool_calls", "stop", "seed", "stream", "stream_options"}
READ |= {"max_tokens", "max_completion_tokens", "logprobs"}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "prediction", "prompt_cache_key", "safety_identifier"}
WITHOUT_EFFECT |= {"prompt_cache_retention"}
ROLES = "system, developer, user, assistant or tool"


def read_openai_request(body: dict[str, Any], images: RequestImages) -> ParsedRequest:
    """The request of a chat completion, its new images not loaded yet. Raises ChatError."""
    refuse_fields(body, REFUSED)
    options = body.get("stream_options")
    limit = body.get("max_completion_tokens")
    field = "max_tokens" if limit is None else "max_completion_tokens"
    chat = ChatRequest(
        messages=_messages(body.get("messages"), images),
        tools=_tools(body.get("tools")),
        max_tokens=count_field(body.get(field), field),
        stop=stop_field(body.get("stop"), "stop"),
        seed=seed_field(body.get("seed")),
        reads_calls=body.get("tool_choice") != "none",
        overridden=overridden_fields(body, READ | WITHOUT_EFFECT | REFUSED.keys()),
    )
    return ParsedRequest(
        chat,
        model=model_field(body.get("model")),
        stream=flag_field(body.get("stream"), "stream"),
        include_usage=bool(object_field(options, "stream_options").get("include_usage")) if options else False,
        logprobs=flag_field(body.get("logprobs"), "logprobs"),
    )


def overridden_fields(body: dict[str, Any], known: Set[str]) -> tuple[str, ...]:
    """The fields in place of which the run's settings are used; ``unknown`` if there are others than ``known`` ones."""
    names = [name for name in OVERRIDDEN if body.get(name) is not None]
    if body.get("tool_choice") not in (None, "auto", "none"):
        names.append("tool_choice")
    if body.get("parallel_tool_calls") is False:
        names.append("parallel_tool_calls")
    if body.keys() - known - set(OVERRIDDEN):
        names.append("unknown")
    return tuple(names)


def _messages(value: Any, images: RequestImages) -> list[Message]:
    messages = [_message(each, f"messages[{i}]", images) for i, each in enumerate(list_field(value, "messages"))]
    if not messages:
        refuse("messages", "one message or more", value)
    return messages


def _message(value: Any, where: str, images: RequestImages) -> Message:
    message = object_field(value, where)
    role = message.get("role")
    if role == "assistant":
        return _assistant(message, where, images)
    if role not in ("system", "developer", "user", "tool"):
        refuse(f"{where}.role", ROLES, role)
    shown: Message = {"role": "system" if role == "developer" else role}
    shown["content"] = content_field(
        message.get("content"), f"{where}.content", _part, images if role in ("user", "tool") else None
    )
    if role == "tool":
        shown["tool_call_id"] = id_field(message.get("tool_call_id"), f"{where}.tool_call_id")
    return shown


def _assistant(message: dict[str, Any], where: str, images: RequestImages) -> Message:
    if message.get("function_call") is not None:
        refuse(f"{where}.function_call", "left out", message["function_call"], "use tool_calls")
    content = message.get("content")
    shown: Message = {"role": "assistant", "content": ""}
    if content is not None:
        shown["content"] = content_field(content, f"{where}.content", _part, None)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        shown["reasoning_content"] = reasoning
    calls = list_field(message.get("tool_calls") or [], f"{where}.tool_calls")
    if calls:
        shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return shown


def _call(value: Any, where: str) -> dict[str, Any]:
    call = object_field(value, where)
    function = object_field(call.get("function"), f"{where}.function")
    return repeated_call(id_field(call.get("id"), f"{where}.id"), function, f"{where}.function")


def repeated_call(call_id: str, function: dict[str, Any], where: str) -> dict[str, Any]:
    """A call that the client repeats, with its arguments as an object."""
    name = text_field(function.get("name"), f"{where}.name")
    arguments, field = function.get("arguments"), f"{where}.arguments"
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            refuse(field, "a JSON object", arguments)
    check_depth(object_field(arguments, field), field)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _part(part: dict[str, Any], where: str, images: RequestImages | None) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return {"type": "text", "text": text_field(part.get(kind), f"{where}.{kind}")}
    if kind != "image_url" or images is None:
        refuse(f"{where}.type", "text" if images is None else "text or image_url", kind)
    image = part.get("image_url")
    address = image.get("url") if isinstance(image, dict) else image
    field = f"{where}.image_url"
    return {"type": "image", "image": images.read(text_field(address, field), field)}


def _tools(value: Any) -> list[dict[str, Any]]:
    tools = list_field(value or [], "tools")
    check_depth(tools, "tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(value: Any, where: str) -> dict[str, Any]:
    tool = object_field(value, where)
    if tool.get("type") != "function":
        refuse(f"{where}.type", "function", tool.get("type"))
    return function_tool(object_field(tool.get("function"), f"{where}.function"), f"{where}.function")


def function_tool(function: dict[str, Any], where: str) -> dict[str, Any]:
    """A function's schema. ``strict`` is left out, since sampling is not constrained."""
    text_field(function.get("name"), f"{where}.name")
    if function.get("parameters") is not None:
        object_field(function["parameters"], f"{where}.parameters")
    return {"type": "function", "function": {key: item for key, item in function.items() if key != "strict"}}


def openai_response(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    message = {"role": "assistant", "refusal": None, **_message_of(response)}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(parsed, response),
        "finish_reason": response.finish_reason,
    }
    return {**_head(parsed, response, "chat.completion"), "choices": [choice], "usage": _usage(response)}


def openai_stream(parsed: ParsedRequest, response: ChatResponse) -> Iterator[bytes]:
    """The events of a streamed response."""
    head = _head(parsed, response, "chat.completion.chunk")
    usage = {"usage": None} if parsed.include_usage else {}

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**head, "choices": [choice], **usage})

    message = _message_of(response)
    yield chunk({"role": "assistant", "content": None if response.tool_calls else ""})
    if "reasoning_content" in message:
        yield chunk({"reasoning_content": message["reasoning_content"]})
    if message["content"] or parsed.logprobs:
        yield chunk({"content": message["content"]}, logprobs=_logprobs(parsed, response))
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, response.finish_reason)
    if parsed.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(response)})
    yield b"data: [DONE]\n\n"


def openai_error(error: ChatError) -> dict[str, Any]:
    """The body of an error. ``code`` is the field that is wrong, or a word such as `max_turns`."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.code if error.status == 400 else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def openai_error_event(error: ChatError) -> bytes:
    """An error after the stream has begun."""
    return _event(openai_error(error))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _head(parsed: ParsedRequest, response: ChatResponse, kind: str) -> dict[str, Any]:
    return {"id": response.id, "object": kind, "created": int(time.time()), "model": parsed.model}


def _message_of(response: ChatResponse) -> dict[str, Any]:
    message: dict[str, Any] = {"content": response.content or (None if response.tool_calls else "")}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    if response.tool_calls:
        message["tool_calls"] = [_issued(call) for call in response.tool_calls]
    return message


def _issued(call: IssuedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def arguments_text(call: IssuedCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _usage(response: ChatResponse) -> dict[str, int]:
    sampled = len(response.token_ids)
    return {
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": response.prompt_tokens + sampled,
    }


def _logprobs(parsed: ParsedRequest, response: ChatResponse) -> dict[str, Any] | None:
    return {"content": token_logprobs(response), "refusal": None} if parsed.logprobs else None


def token_logprobs(response: ChatResponse) -> list[dict[str, Any]]:
    """Of all sampled tokens, also those of reasoning, of calls and of the end of the turn. A part of a character has no bytes."""
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(response.tokens, response.logprobs, strict=True)
    ]
