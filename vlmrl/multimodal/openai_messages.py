"""Messages in the form of OpenAI's chat API: as agents send them, and as an API model receives and answers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from vlmrl.multimodal.images import data_uri
from vlmrl.multimodal.messages import is_image, parts_of_message, tools_as_user
from vlmrl.types import ImageSource, Message


def openai_messages(messages: Sequence[Message], address: Callable[[ImageSource], str] = data_uri) -> list[Message]:
    """Messages of a task as an OpenAI client sends them: each image as ``address`` of it, by default a data URI.

    ``{"type": "image", "image": pil}`` becomes ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``.
    """

    def shown(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": address(part["image"])}} if is_image(part) else part

    return [
        {**message, "content": list(map(shown, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def request_messages(messages: Sequence[Message], address: Callable[[ImageSource], str] = data_uri) -> list[Message]:
    """As :func:`openai_messages`, for a request to a chat API.

    The API has no images in messages of the role ``tool``: those of successive results follow them in one user message.
    """
    shown: list[Message] = []
    for role, run in groupby(messages, lambda message: message.get("role")):
        images: list[dict[str, Any]] = []
        for message in run:
            parts = parts_of_message(message)
            if role == "tool" and any(map(is_image, parts)):
                images += filter(is_image, parts)
                message = {**message, "content": "\n".join(part["text"] for part in parts if not is_image(part))}
            if role == "assistant" and message.get("tool_calls") and not message.get("content"):
                message = {**message, "content": None}  # some APIs refuse an empty text
            shown.append(message)
        if images:
            shown.append({"role": "user", "content": images})
    return openai_messages(shown, address)


def with_call_ids(response: Message, answer: Sequence[Message]) -> list[Message]:
    """An env's ``answer`` to an API's ``response``, its results with the ids of the response's calls, in their order.

    Without ids if there are more results than calls: some are of calls that are written in the response's text.
    """
    ids = [call["id"] for call in response.get("tool_calls", ())]
    results = [message for message in answer if message.get("role") == "tool"]
    if len(results) > len(ids):
        return list(answer)
    following = iter(ids)
    return [
        {**message, "tool_call_id": next(following)} if message.get("role") == "tool" else message for message in answer
    ]


def answer_calls(response: Message, answer: Sequence[Message]) -> list[Message]:
    """What an API gets as the ``answer`` of :func:`with_call_ids`: each call has one message of the role ``tool``.

    It is empty if the env answered the call in another form. Results without ids become user messages.
    """
    ids = [call["id"] for call in response.get("tool_calls", ())]
    results = [message for message in answer if message.get("role") == "tool"]
    if len(results) > len(ids):
        return answer_calls(response, tools_as_user(answer))
    return [*({"role": "tool", "tool_call_id": left, "content": ""} for left in ids[len(results) :]), *answer]


def response_text(message: Message) -> str:
    """An API's response as an env reads it: its text, then each call as ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``.

    Arguments are passed on as the API wrote them, valid or not: what is wrong with them is for the env to say.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f'{{"name": {json.dumps(call["name"])}, "arguments": {_one_call(call["arguments"])}}}' for call in calls]
    return "\n".join([*filter(None, [message["content"]]), *(f"<tool_call>\n{call}\n</tool_call>" for call in written)])


def _one_call(arguments: str) -> str:
    """JSON without tags, which would end the call: ``"</tool_call>"`` in a string is written ``"\\u003c/tool_call>"``."""
    return arguments.replace("<", "\\u003c") if arguments.strip() else "{}"
