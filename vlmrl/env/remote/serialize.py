"""Tasks and messages as JSON, images included: the payload between an env server and its client.

A PIL image becomes ``{"$image": "<PNG in base64>"}``, in its own mode; bytes become ``{"$bytes": "<base64>"}``. Both are restored
as what they were. A path of an image is replaced by the file's bytes, since it means nothing on the other machine. A URL is kept.
"""

from __future__ import annotations

import base64
import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.multimodal.images import encode_png
from vlmrl.types import Message, Task

IMAGE, BYTES = "$image", "$bytes"


def serialize(value: Any, name: str) -> Any:
    """``value`` as JSON. Raises ValueError, with ``name``, for a value that JSON cannot represent."""
    if isinstance(value, Image.Image):
        return {IMAGE: _base64(encode_png(value))}
    if isinstance(value, bytes):
        return {BYTES: _base64(value)}
    if isinstance(value, dict):
        is_image = value.get("type") == "image" and "image" in value
        plain = {**value, "image": _portable(value["image"])} if is_image else value
        return {str(key): serialize(item, f"{name}.{key}") for key, item in plain.items()}
    if isinstance(value, list | tuple):
        return [serialize(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"{name} must be plain data (text, numbers, lists, dicts, images) to be sent to another process, "
        f"but it is a {type(value).__name__}."
    )


def deserialize(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {IMAGE}:
            return Image.open(io.BytesIO(base64.b64decode(value[IMAGE])))
        if value.keys() == {BYTES}:
            return base64.b64decode(value[BYTES])
        return {key: deserialize(item) for key, item in value.items()}
    return [deserialize(item) for item in value] if isinstance(value, list) else value


def serialize_task(task: Task) -> dict[str, Any]:
    """A task as JSON. ``images`` is ``None`` if they are those of the prompt, so that they are not sent twice."""
    names = [field.name for field in fields(task) if field.name != "images"]
    payload = {name: serialize(getattr(task, name), f"task.{name}") for name in names}
    in_prompt = _images_of(task.prompt)
    differ = len(in_prompt) != len(task.images) or any(a is not b for a, b in zip(in_prompt, task.images, strict=True))
    return {
        **payload,
        "images": serialize([_portable(image) for image in task.images], "task.images") if differ else None,
    }


def deserialize_task(payload: dict[str, Any]) -> Task:
    task = deserialize(payload)
    images = _images_of(task["prompt"]) if task["images"] is None else task["images"]
    return Task(**{**task, "images": images})


def _portable(source: Any) -> Any:
    """An image source that is valid on another machine."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str | Path) and not str(source).startswith(("http://", "https://", "data:")):
        return Path(str(source).removeprefix("file://")).read_bytes()
    return source


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _images_of(prompt: list[Message]) -> list[Any]:
    contents = [message.get("content") for message in prompt]
    return [
        part["image"]
        for content in contents
        if isinstance(content, list)
        for part in content
        if part["type"] == "image"
    ]
