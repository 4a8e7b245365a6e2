"""Splits a sampled response into the parts of a chat API: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.env.tool_calls import ToolCall, by_name, read_tool_calls

Schema = dict[str, Any]
OPENING, CLOSING = "<tool_call>", "</tool_call>"


def split_response(
    text: str,
    tools: Sequence[Schema],
    tool_format: str | None,
    *,
    reads_calls: bool,
    stop: Sequence[str] = (),
    opening: str = "",
) -> tuple[str, str, list[ToolCall]]:
    """Content, reasoning and calls of a sampled text, whose end-of-turn token is already removed.

    ``<think>Four.</think>Adding.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>`` is ``("Adding.", "Four.",
    [ToolCall("add", {"a": 2})])``. What is not reasoning is content, byte for byte, up to the first call that parses; whitespace alone
    before a call is none. Content ends before the first of the strings ``stop``, unless that ends a call. Without ``tools``, or unless
    ``reads_calls``, a call is content.

    ``opening`` is what the generation prompt writes before the text: reasoning that it begins goes on in the text. It has no stop.
    """
    read = by_name(tools) if reads_calls else {}  # once for all calls: an agent may offer thousands of tools
    begun = "" if "</think>" in opening else opening
    parts = _parts(begun + text, read, tool_format)
    ends = [position for each in stop if (position := text.find(each)) >= 0]
    if ends:
        cut = _parts(begun + text[: min(ends)], read, tool_format)
        parts = cut if len(cut[2]) == len(parts[2]) else parts
    return parts


def _parts(text: str, tools: Mapping[str, Schema], tool_format: str | None) -> tuple[str, str, list[ToolCall]]:
    reasoning, body = _without_reasoning(text)
    if not tools:
        return body, reasoning, []
    readable = body.partition("<think>")[0]  # as read_tool_calls: no calls in reasoning that does not end
    content, calls, position = body, list[ToolCall](), 0
    while (start := readable.find(OPENING, position)) >= 0 and (close := readable.find(CLOSING, start)) >= 0:
        position = close + len(CLOSING)
        call = _call(readable[start:position], tools, tool_format)
        if call.problem or not call.name:
            continue
        # As inference servers do: clients take any text for an answer, also the newline between two calls.
        if not calls:
            content = body[:start] if body[:start].strip() else ""
        calls.append(call)
    return content, reasoning, calls


def _call(text: str, tools: Mapping[str, Schema], tool_format: str | None) -> ToolCall:
    try:
        return read_tool_calls(text, tools, tool_format)[0]
    except (AttributeError, TypeError):  # the agent's schemas are no JSON schemas, so that they type no argument
        return read_tool_calls(text, (), tool_format)[0]


def _without_reasoning(text: str) -> tuple[str, str]:
    """The reasoning and the rest. The template may have opened the reasoning; a response that was cut off does not end it."""
    head, closing, body = text.rpartition("</think>")
    if closing:
        return head.lstrip().removeprefix("<think>") if head.lstrip().startswith("<think>") else head, body
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>"), ""
    return "", text
