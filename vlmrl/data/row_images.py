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

from vlmrl.data.row_problems import MARK, call_problem, content_problem, other_mark
from vlmrl.types import ImageSource, Message

PLAIN_MARK = "For a mark that is plain text, give the prompt as messages with a list of parts, where marks are not read"
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
OWN_SOURCE = ("image", "url", "path", "base64", "image_url")


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
        if unmarked > 0 and (other := other_mark(marked)):
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
