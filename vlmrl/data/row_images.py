"""Puts a row's images into its prompt, always in the row's order.

- A string prompt is a user message. Each ``<image>`` in it marks an image, and more marks than images are an error; in a row whose
  column of images is empty they are plain text. Images without a mark go first: ``"<image> and this"`` with images a, b is a, b,
  ``" and this"``. They are an error where the messages show images of their own, or have a mark elsewhere or of another program.
- In a list of messages, ``{"type": "image"}`` parts without a source take the images. User messages whose content is a string
  may have marks too. An ``index`` of a part, as some datasets have it, must agree with that.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image

from vlmrl.multimodal.messages import parts_of_message
from vlmrl.types import ImageSource, Message

MARK = "<image>"
PLAIN_MARK = "For a mark that is plain text, give the prompt as messages with a list of parts, where marks are not read"
OTHER_MARK = re.compile(rf"(?!{MARK}|<img>)(?i:<\|?(image|img)([ _-]?(\d+|pad|placeholder|here))?\|?>)")
"""Marks of images of other programs, such as ``<image 1>``, ``<|image_1|>``, ``<|image_pad|>``, ``<ImageHere>``. ``<img>`` is HTML."""
NAMED_FILE = re.compile(r"<(img|video|audio)>[^<>\n]{1,2000}\.\w{2,5}</\1>")
"""A file that a text names, as in ``<img>a.png</img>`` of Qwen-VL and ms-swift."""
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
OWN_SOURCE = ("image", "url", "path", "base64", "image_url")
UNREAD = {"video": ("<video>", MARK), "audio": ("<audio>",)}
"""What no model here reads: how the names of its columns begin, and its marks."""
OTHER_ARGUMENTS = ("parameters", "args", "input", "kwargs")
"""Fields of a call in which others write its arguments."""
BESIDE = ("image", "images", "image_url", "image_path", "video", "videos", "audio", "audios")
"""Fields of a message beside its content that are not read: no chat template shows them."""
CALLS_BESIDE = ("tools", "functions", "function_calls", "function_call", "tool_call", "observation")
"""Such fields with tools, calls and results: those of Olmo, GLM and OpenAI's earlier form."""
RESULTS = ("output", "result", "results", "response", "observation", "text", "data")
"""Fields in which others write the result of a tool."""
END = re.compile(r"(<\|(im_end|endoftext|eot_id|eom_id|end|return|end_of_text)\|>|</s>|<eos>|<end_of_turn>)\Z")
"""How a response ends that has the end of a chat template as text: a model would learn to write it as text."""
PART_FIELDS = {"type", "text", "image", "image_url", "url", "path", "index", "thinking", "signature"}


class RowImages:
    """Puts one row's images into its prompt. ``where`` names the row in errors; relative paths are looked up in ``roots``."""

    def __init__(self, where: str, roots: list[Path]) -> None:
        self.where = where
        self.roots = list(dict.fromkeys(roots))
        self.sources: list[ImageSource] = []

    def set_column(self, column: Any) -> None:
        """Set the value of the row's image column: ``None``, one image, or a list of images."""
        given = [] if column is None else list(column) if isinstance(column, (list, tuple)) else [column]
        self.sources = [self._located(source) for source in given]

    def messages(self, prompt: Any) -> list[Message]:
        """The prompt as messages, with every image part as ``{"type": "image", "image": source}``."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [self._message(message) for message in self._checked(prompt)]
        marked = [message for message in messages if message["role"] == "user" and isinstance(message["content"], str)]
        shown = [part for message in messages for part in image_parts(message)]
        parts = [part for part in shown if "image" not in part]
        bare, indices = len(parts), [index for part in parts if (index := part.pop("index", None)) is not None]
        if indices not in (list(range(bare)), list(range(1, bare + 1)), []):
            raise ValueError(
                f"{self.where}: the index of its image parts must count the row's images in order from 0 or 1, but it is "
                f"{indices!r:.100}. Put the images in the order in which the parts show them, each as often"
            )
        marks = sum(message["content"].count(MARK) for message in marked) if self.sources else 0
        if marks > max(0, len(self.sources) - bare):
            raise ValueError(
                f"{self.where}: {marks} {MARK} marks for {len(self.sources) - bare} images: each mark needs an image. {PLAIN_MARK}"
            )
        unmarked = len(self.sources) - bare - marks
        if unmarked > 0 and (other := _other_mark(marked)):
            raise ValueError(
                f"{self.where}: the mark {other!r} of an image is not read, and its image would go before the text: write {MARK}"
            )
        if unmarked < 0 or (unmarked and (shown or not _is_first(messages, marked))):
            raise ValueError(
                f"{self.where}: {len(self.sources)} images for {bare} image parts without a source and {marks} "
                f"{MARK} marks in the prompt's texts of users. Make the numbers agree. {PLAIN_MARK}"
            )
        self._fill(messages, marks, unmarked)
        return messages

    def _fill(self, messages: list[Message], marks: int, unmarked: int) -> None:
        """Insert the images in order: into parts without a source, at marks, and unmarked ones before the first user text."""
        queue = iter(self.sources)
        for message in messages:
            for part in image_parts(message):
                if "image" not in part:
                    part["image"] = next(queue)
            if message["role"] == "user" and isinstance(message["content"], str) and (marks or unmarked):
                pieces = message["content"].split(MARK, marks)
                marks -= len(pieces) - 1
                message["content"] = _interleaved(pieces, queue, unmarked)
                unmarked = 0

    def _checked(self, prompt: Any) -> list[Message]:
        fits = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and m.get("role") for m in prompt)
        if not fits:
            raise ValueError(f"{self.where}: the prompt must be a string or a list of messages, not {prompt!r:.200}")
        return prompt

    def _message(self, message: Message) -> Message:
        """A copy with image parts in one form and without the empty keys that columnar files add."""
        calls = message.get("tool_calls")
        problems = [call_problem(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        if problem := next(filter(None, [content_problem(message), *problems]), None):
            raise ValueError(f"{self.where}: {problem}")
        made = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in made:
            made["tool_calls"] = without_nulls(made["tool_calls"])
        content = made.setdefault("content", "")
        if isinstance(content, list):
            made["content"] = [self._part(part) for part in content]
        return made

    def _part(self, part: Any) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        made = {key: value for key, value in part.items() if value is not None}
        if made.get("type") not in ("image", "image_url"):
            return made
        key = next((key for key in OWN_SOURCE if key in made), None)
        if key is None:
            return {"type": "image", "index": made.get("index")}
        source = made[key]
        if key == "image_url":
            source = source["url"] if isinstance(source, dict) else source
        return {"type": "image", "image": base64.b64decode(source) if key == "base64" else self._located(source)}

    def _located(self, source: ImageSource) -> ImageSource:
        """The source, a relative path made absolute: in the data's own folder or in the working directory."""
        if isinstance(source, dict) and source.get("bytes") is not None:
            return source
        path = source.get("path") if isinstance(source, dict) else source
        if isinstance(path, (bytes, PIL.Image.Image)):
            return path
        if not isinstance(path, (str, Path)):
            raise ValueError(f"{self.where}: an image must be bytes, a path, a URL or a PIL image, not {source!r:.80}")
        if re.match(r"data:|[a-z0-9]+://", str(path)):
            return path
        tried = list(dict.fromkeys(str(root / Path(path).expanduser()) for root in self.roots))
        found = next(filter(os.path.isfile, tried), None)
        if found is None:
            raise ValueError(f"{self.where}: no image {str(path)!r:.200}. Looked at: {', '.join(tried):.1000}")
        return found


def content_problem(message: Message) -> str:
    """What is wrong with a message that has images beside its content, or no content, such as one with its text under another name.

    Else ``""``. Without an error the prompt would lack its images or its text, or an empty response would be trained. Calls and
    results of tools may have no content.
    """
    beside = next((key for key in BESIDE if _is_filled(message.get(key))), None)
    if beside is not None and not _has_image(message.get("content")):
        what = f"a message of the role {message['role']!r:.50} has {beside!r} beside its content, which is not read"
        return f"{what}: put images into parts of the content, or into the row's column of images"
    beside = next((key for key in CALLS_BESIDE if _is_filled(message.get(key))), None)
    if beside is not None and message.get("content") is not None:
        what = f"a message of the role {message['role']!r:.50} has {beside!r} beside its content, which is not read"
        return f"{what}: put calls into 'tool_calls', results into the content, and tools into the row's column of tools or the env"
    if message["role"] != "tool" and _is_parts_as_text(message.get("content")):
        return f"a message of the role {message['role']!r:.50} has the parts of its content written as a text: write them as a list"
    if message["role"] == "assistant" and (end := END.search(_last_text(message.get("content")).rstrip()[-30:])):
        return (
            f"a response ends with {end[0]!r} as text: remove it, since the chat template writes the end of a response"
        )
    if message.get("content") is not None or message.get("tool_calls"):
        return ""
    if message["role"] == "tool" and not any(_is_filled(message.get(key)) for key in RESULTS):
        return ""
    given = ", ".join(repr(key) for key, value in message.items() if value is not None)
    return f"a message of the role {message['role']!r:.50} has no 'content', only {given:.200}"


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


def _is_parts_as_text(content: Any) -> bool:
    """Whether a content is a text with a list of parts in JSON."""
    if not isinstance(content, str) or not re.match(r'\s*\[\s*\{\s*"', content):
        return False
    try:
        parts = json.loads(content)
    except (ValueError, RecursionError):
        return False
    kinds = ("text", "image", "image_url", "thinking")
    return all(isinstance(part, dict) and part.get("type") in kinds and part.keys() <= PART_FIELDS for part in parts)


def _other_mark(messages: list[Message]) -> str:
    """The first mark of another program in the texts of ``messages``, or ``""``."""
    found = next(filter(None, (OTHER_MARK.search(message["content"]) for message in messages)), None)
    return found[0] if found else ""


def _last_text(content: Any) -> str:
    """The text at the end of a content, or ``""``."""
    last = content[-1] if isinstance(content, list) and content else content
    text = last.get("text") if isinstance(last, dict) else last
    return text if isinstance(text, str) else ""


def _has_image(content: Any) -> bool:
    """Whether a message's content has an image or a mark."""
    parts = content if isinstance(content, list) else []
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    return not kinds.isdisjoint(("image", "image_url")) or (isinstance(content, str) and MARK in content)


def _is_filled(value: Any) -> bool:
    """Whether a field holds something: no number, which may be a count, and nothing empty."""
    if isinstance(value, str | bytes | list | tuple | dict):
        return bool(value)
    return value is not None and not isinstance(value, bool | int | float)


def _is_first(messages: list[Message], marked: list[Message]) -> bool:
    """Whether images may go before the first of ``marked``: no user comes before it, and no text elsewhere has a mark."""
    first = next((message for message in messages if message["role"] == "user"), None)
    elsewhere = [message["content"] for message in messages if message["role"] != "user"]
    has_mark = any(isinstance(text, str) and MARK in text for text in elsewhere)
    return bool(marked) and first is marked[0] and not has_mark


def image_parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if part.get("type") == "image"] if isinstance(content, list) else []


def _interleaved(pieces: list[str], queue: Iterator[ImageSource], unmarked: int) -> list[dict[str, Any]]:
    """``["a ", " b"]`` with one image unmarked: image, ``"a "``, image, ``" b"``; empty texts are left out."""
    parts = [{"type": "image", "image": next(queue)} for _ in range(unmarked)]
    for index, piece in enumerate(pieces):
        if index:
            parts.append({"type": "image", "image": next(queue)})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


class JsonObject(dict[str, Any]):
    """An object that was read from JSON: its nulls are its own."""


def json_as_written(text: str) -> Any:
    """A JSON text, whose objects are :class:`JsonObject`."""
    return json.loads(text, object_hook=JsonObject)


def without_nulls(value: Any) -> Any:
    """A copy without the keys whose value is null: columnar files give each object the keys of all rows' objects."""
    if isinstance(value, JsonObject):
        return value
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
