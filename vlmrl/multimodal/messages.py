"""The parts of messages: their texts and sizes, and the results of tools as a user message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from vlmrl.types import ImageSource, Message
from vlmrl.utils.json_files import VALUE_BYTES

LONG_TEXT = 10_000  # characters; encoding them takes about 2 ms
MOST_VALUES = 2**15
"""Of calls and tools from outside: writing them as JSON, as templates do, holds the interpreter for 1 to 4 us a value."""


class Markup(str):
    """Text of ours in a message, whose added tokens are not escaped. No JSON and no dataset can hold one."""


TOOL_TAGS = (Markup("<tool_response>\n"), Markup("\n</tool_response>"))


def tools_as_user(messages: Sequence[Message]) -> list[Message]:
    """Tool messages that follow each other as one user message, each between ``<tool_response>`` tags; others as they are."""
    shown: list[Message] = []
    for is_tool, run in groupby(messages, lambda message: message.get("role") == "tool"):
        if not is_tool:
            shown.extend(run)
            continue
        parts: list[dict[str, Any]] = []
        for message in run:
            opening = Markup("\n" + TOOL_TAGS[0]) if parts else TOOL_TAGS[0]
            parts += [text_part(opening), *parts_of_message(message), text_part(TOOL_TAGS[1])]
        shown.append({"role": "user", "content": parts})
    return shown


def parts_of_message(message: Message) -> list[dict[str, Any]]:
    """A message's content as a list of parts."""
    content = message.get("content") or []
    return [text_part(content)] if isinstance(content, str) else content


def is_long(value: Any) -> bool:
    """Whether messages, tool schemas or both hold so much that rendering them would stop the event loop.

    Counts the characters of all texts, names of fields included, and each value as one; it stops counting at :data:`LONG_TEXT`.
    """
    left = LONG_TEXT
    for each in values_of(value):
        left -= 1 + (len(each) if isinstance(each, str) else 0)
        if left < 0:
            return True
    return False


def has_many_values(value: Any) -> bool:
    """Whether messages, calls or tools have more than MOST_VALUES values, names of fields included."""
    return sum(1 for _ in islice(values_of(value), MOST_VALUES + 1)) > MOST_VALUES


def characters_of(value: Any) -> int:
    """The characters of all texts in messages or tool schemas, names of fields included, and one for each other value."""
    return sum(len(each) if isinstance(each, str) else 1 for each in values_of(value))


def bytes_of(value: Any) -> int:
    """The memory that messages and tool schemas take at most, without their images."""
    return sum(sys.getsizeof(each) if isinstance(each, str) else VALUE_BYTES for each in values_of(value))


def values_of(value: Any) -> Iterator[Any]:
    """All that is in a JSON value, itself and names of fields included."""
    inner = [value]
    while inner:
        each = inner.pop()
        if isinstance(each, dict):
            inner += each
            inner += each.values()
        elif isinstance(each, list | tuple):
            inner += each
        yield each


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def kind_of_part(part: dict[str, Any]) -> tuple[str, bool]:
    """The part's type, and whether its text is :class:`Markup`."""
    return part["type"], isinstance(part.get("text"), Markup)


def copied(value: Any) -> Any:
    """The same messages in dicts and lists of their own, for code that may keep and change them. Images are not copied."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def same_messages(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether messages are equal, with the same images."""
    try:
        return bool(messages == others)
    except ValueError:  # of arrays
        return False


def images_of(messages: Iterable[Message]) -> list[ImageSource]:
    """The images of the messages' parts, in order."""
    contents = [message.get("content") for message in messages]
    return [part["image"] for content in contents if isinstance(content, list) for part in content if is_image(part)]


def map_images(messages: Iterable[Message], change: Callable[[ImageSource], ImageSource]) -> list[Message]:
    """The messages with ``change`` applied to the image of each part that has one. A message without images is not copied."""
    return [_map_message(message, change) for message in messages]


def _map_message(message: Message, change: Callable[[ImageSource], ImageSource]) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    return {
        **message,
        "content": [{**part, "image": change(part["image"])} if is_image(part) else part for part in content],
    }


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image with its source."""
    return isinstance(part, dict) and part.get("type") == "image" and "image" in part


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with ``change`` applied to every string in it, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
