"""What an env server and its client put on the wire: tasks and messages as JSON, their images inside.

A PIL image is ``{"$image": "<PNG in base64>"}`` and comes back as one, bytes are ``{"$bytes": "<base64>"}``. An image that is
named by its path is read where the path means something, and travels as bytes; a URL stays one.
"""

from __future__ import annotations

import base64
import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.types import Message, Task

IMAGE, BYTES = "$image", "$bytes"


def to_wire(value: Any, name: str) -> Any:
    """``value`` as JSON. Raises ValueError for what JSON cannot hold; ``name`` is what it is called there."""
    if isinstance(value, Image.Image):
        return {IMAGE: _base64(_png(value))}
    if isinstance(value, bytes):
        return {BYTES: _base64(value)}
    if isinstance(value, dict):
        is_image = value.get("type") == "image" and "image" in value
        plain = {**value, "image": _carried(value["image"])} if is_image else value
        return {str(key): to_wire(item, f"{name}.{key}") for key, item in plain.items()}
    if isinstance(value, list | tuple):
        return [to_wire(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be sent to another process: make it plain data."
    )


def from_wire(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {IMAGE}:
            return Image.open(io.BytesIO(base64.b64decode(value[IMAGE])))
        if value.keys() == {BYTES}:
            return base64.b64decode(value[BYTES])
        return {key: from_wire(item) for key, item in value.items()}
    return [from_wire(item) for item in value] if isinstance(value, list) else value


def task_to_wire(task: Task) -> dict[str, Any]:
    """``images`` that are only the prompt's own are not sent twice: they are ``None``."""
    names = [field.name for field in fields(task) if field.name != "images"]
    sent = {name: to_wire(getattr(task, name), f"task.{name}") for name in names}
    shown = _images_of(task.prompt)
    own = len(shown) != len(task.images) or any(a is not b for a, b in zip(shown, task.images, strict=True))
    return {**sent, "images": to_wire([_carried(image) for image in task.images], "task.images") if own else None}


def task_from_wire(sent: dict[str, Any]) -> Task:
    task = from_wire(sent)
    images = _images_of(task["prompt"]) if task["images"] is None else task["images"]
    return Task(**{**task, "images": images})


def _carried(source: Any) -> Any:
    """An image's source that means the same elsewhere."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str | Path) and not str(source).startswith(("http://", "https://", "data:")):
        return Path(str(source).removeprefix("file://")).read_bytes()
    return source


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    kept = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    kept.save(buffer, format="PNG", compress_level=1, exif=image.getexif())
    return buffer.getvalue()


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
