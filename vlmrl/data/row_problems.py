"""What makes a row a bad one, since its messages would be read in part or as plain text: marks and fields of other programs."""

from __future__ import annotations

import json
import re
from typing import Any

from vlmrl.multimodal.messages import parts_of_message
from vlmrl.types import Message

MARK = "<image>"
OTHER_MARK = re.compile(rf"(?!{MARK}|(?i:<img>))(?i:<\|?(image|img)([ _-]?(\d+|pad|placeholder|here))?\|?>)")
"""Marks of images of other programs, such as ``<image 1>``, ``<|image_1|>``, ``<|image_pad|>``, ``<ImageHere>``. ``<img>`` is HTML."""
NAMED_FILE = re.compile(r"^(?:\w+ \d+: ?)?<(img|video|audio)>[^<>\n]{1,2000}\.\w{2,5}</\1>", re.MULTILINE)
"""A file that a text names, as in ``Picture 1: <img>a.png</img>`` of Qwen-VL and ms-swift. Within a line it may be XML."""
UNREAD = {"video": ("<video>", MARK), "audio": ("<audio>",)}
"""What no model here reads: how the names of its columns begin, and its marks."""
OTHER_ARGUMENTS = ("parameters", "args", "input", "kwargs")
"""Fields of a call in which others write its arguments."""
IMAGES_BESIDE = ("image", "images", "image_url", "image_path", "video", "videos", "audio", "audios")
"""Fields of a message beside its content with images, which are not read."""
CALLS_BESIDE = ("tools", "functions", "function_calls", "function_call", "tool_call", "observation")
"""Fields of a message beside its content with tools, calls and results: those of Olmo, GLM and OpenAI's earlier form."""
RESULTS = ("output", "result", "results", "response", "observation", "text", "data")
"""Fields in which others write the result of a tool."""
TEMPLATE_END = re.compile(
    r"(<\|(im_end|endoftext|eot|eot_id|eom_id|end|return|end_of_text)\|>|</s>|<eos>|<end_of_(turn|utterance)>)\Z"
)
"""How a response ends that has the end of a chat template as text: a model would learn to write it as text."""
PART_FIELDS = {"type", "text", "image", "image_url", "url", "path", "index", "thinking", "signature"}
"""What the parts of a content have."""
TEXT_PARTS = ("text", "thinking")
"""The kinds of parts of a response: one that lists images, too, may be an answer in JSON."""
PARTS = (*TEXT_PARTS, "image", "image_url")


def content_problem(message: Message) -> str:
    """What is wrong with a message that has something beside its content, a content in another form, or none; else ``""``.

    Without an error the prompt would lack its images or its text, or an empty response would be trained. Calls and results of tools
    may have no content.
    """
    role, content = message["role"], message.get("content")
    whose = f"a message of the role {role!r:.50}"
    images = next((key for key in IMAGES_BESIDE if _is_filled(message.get(key))), None)
    if images is not None and not has_image(content):
        remedy = "put images into parts of the content, or into the row's column of images"
        return f"{whose} has {images!r} beside its content, which is not read: {remedy}"
    calls = next((key for key in CALLS_BESIDE if message.get(key) not in (None, "", "[]", "{}", "null", [], {})), None)
    if calls is not None and content is not None and not message.get("tool_calls"):
        remedy = (
            "put calls into 'tool_calls', results into the content, and tools into the row's column of tools or the env"
        )
        return f"{whose} has {calls!r} beside its content, which is not read: {remedy}"
    if role != "tool" and _is_parts_as_text(content, TEXT_PARTS if role == "assistant" else PARTS):
        return f"{whose} has the parts of its content written as a text: write them as a list"
    if role == "assistant" and (end := _written_end(content)):
        return f"a response ends with {end!r} as text: remove it, the chat template writes the end of a response"
    if role == "tool":
        is_whole = bool(content) or not any(_is_filled(message.get(key)) for key in RESULTS)
    else:
        is_whole = content is not None or bool(message.get("tool_calls"))
    if is_whole:
        return ""
    given = ", ".join(repr(key) for key, value in message.items() if value is not None)
    return f"{whose} has no 'content', only {given:.200}"


def call_problem(call: dict[str, Any]) -> str:
    """What is wrong with a call that has its name or its arguments under another name, such as Llama's ``parameters``; else ``""``.

    Some chat templates would write it without them.
    """
    function = call["function"] if isinstance(call.get("function"), dict) else call
    elsewhere = any(_is_filled(function.get(key)) for key in OTHER_ARGUMENTS)
    if function.get("name") and (function.get("arguments") is not None or not elsewhere):
        return ""
    return f"a call needs a name and arguments, but it has {', '.join(map(repr, function)):.200}"


def unread_mark(messages: list[Message], row: dict[str, Any]) -> str:
    """What is wrong with messages that name a file, or have the mark of a video or an audio of their row, read as text; else ``""``.

    The row's images are in the messages already, so that an ``<image>`` in a text beside a video is the video's.
    """
    shown = [parts_of_message(message) for message in messages if message["role"] in ("user", "tool")]
    texts = [str(part.get("text")) for parts in shown for part in parts]
    asked = [str(part.get("text")) for each in messages if each["role"] == "user" for part in parts_of_message(each)]
    if named := next(filter(None, map(NAMED_FILE.search, asked)), None):
        what = f"a text names a file in <{named[1]}>, {named[0]!r:.100}, which is not read"
        return f"{what}: write {MARK} in its place, and put the image into the row's column of images"
    for name, marks in UNREAD.items():
        mark = next((mark for mark in marks if any(mark in text for text in texts)), None)
        column = next((key for key in row if str(key).lower().startswith(name) and _is_filled(row[key])), None)
        if mark is not None and column is not None:
            what = f"a text has the mark {mark} of its column {column!r}, but videos and audio are not read"
            return f"{what}: remove the row, or show frames as images in the mark's place"
    return ""


def _is_parts_as_text(content: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a content is a text with a list of parts of these ``kinds`` in JSON."""
    if not isinstance(content, str) or not re.match(r'\s*\[\s*\{\s*"', content):
        return False
    try:
        parts = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return all(isinstance(part, dict) and part.get("type") in kinds and part.keys() <= PART_FIELDS for part in parts)


def other_mark(messages: list[Message]) -> str:
    """The first mark of another program in the texts of ``messages``, or ``""``."""
    found = next(filter(None, (OTHER_MARK.search(message["content"]) for message in messages)), None)
    return found[0] if found else ""


def _written_end(content: Any) -> str:
    """The token of :data:`TEMPLATE_END` at the end of a content, or ``""``; ``</s>`` also ends what HTML's ``<s>`` strikes through."""
    last = content[-1] if isinstance(content, list) and content else content
    text = last.get("text") if isinstance(last, dict) else last
    end = TEMPLATE_END.search(text.rstrip()[-30:]) if isinstance(text, str) else None
    return end[0] if end and not (end[0] == "</s>" and "<s>" in str(text)) else ""


def has_image(content: Any) -> bool:
    """Whether a message's content has an image or a mark."""
    parts = content if isinstance(content, list) else []
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    return not kinds.isdisjoint(("image", "image_url")) or (isinstance(content, str) and MARK in content)


def _is_filled(value: Any) -> bool:
    """Whether a field holds something: no number, which may be a count, and nothing empty."""
    if isinstance(value, str | bytes | list | tuple | dict):
        return bool(value)
    return value is not None and not isinstance(value, bool | int | float)
