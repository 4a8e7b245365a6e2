"""Tasks and messages as JSON, images included: the payload between an env server and its client.

A PIL image becomes ``{"$image": "<PNG in base64>"}``, in its own mode; bytes become ``{"$bytes": "<base64>"}``; NaN and the
infinities become ``{"$float": "nan"}``. All are restored as what they were. A frozen image becomes the bytes of a PNG, which is made
once for all messages that show it, and which its receiver decodes once.

A payload holds every image's content. Paths and URLs are valid on the sender's machine only, so the sender replaces them by the file's
bytes, and the receiver refuses them: a payload cannot make another machine open a file or an address.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.multimodal.embedded import check_embedded, embed_image, encode_once
from vlmrl.multimodal.images import (
    MAX_PIXELS,
    MOST_PIXELS,
    DecodedImage,
    ImageError,
    describe,
    encode_png,
    image_size,
)
from vlmrl.multimodal.messages import MOST_VALUES, has_many_values, images_of, map_images, values_of
from vlmrl.types import ImageSource, Message, Task

IMAGE, BYTES, FLOAT, ESCAPED = "$image", "$bytes", "$float", "$dict"
MARKERS = frozenset({IMAGE, BYTES, FLOAT, ESCAPED})
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
BYTE_MODES = ("1", "L", "P")  # of Pillow, which keeps a byte for each of their pixels, and four for one of RGB
MAX_TEXT = 2**22  # characters of the messages of one payload, about a million tokens
LONG_NAME = 200  # characters of a value's name in an error
ROLES = ("system", "developer", "user", "assistant", "tool")


def serialize(value: Any, name: str) -> Any:
    """``value`` as JSON. Raises ValueError, with ``name``, for a value that JSON cannot represent."""
    if isinstance(value, Image.Image):
        return {IMAGE: _base64(encode_png(value))}
    if isinstance(value, DecodedImage):
        return {BYTES: _base64(encode_once(value))}
    if isinstance(value, bytes):
        return {BYTES: _base64(value)}
    if isinstance(value, dict):
        plain = {str(key): serialize(item, _inside(name, str(key))) for key, item in value.items()}
        return {ESCAPED: plain} if len(plain) == 1 and plain.keys() <= MARKERS else plain
    if isinstance(value, list | tuple):
        return [serialize(item, _inside(name, index)) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(float(value))}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"{name} must be plain data (text, numbers, lists, dicts, images) to be sent to another process, "
        f"but it is a {type(value).__name__}."
    )


def deserialize(value: Any, name: str) -> Any:
    """The inverse of :func:`serialize`. Raises ValueError, with ``name``, for invalid payloads."""
    if isinstance(value, list):
        return [deserialize(item, _inside(name, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and value.keys() <= MARKERS:
        ((marker, content),) = value.items()
        return _restore(marker, content, name)
    return {key: deserialize(item, _inside(name, key)) for key, item in value.items()}


def serialize_messages(messages: list[Message], name: str) -> Any:
    """Messages as JSON, each image replaced by its content. Raises ValueError for an image that does not load."""
    return serialize(map_images(messages, embed_image), name)


def deserialize_messages(payload: Any, name: str) -> list[Message]:
    """The messages of a payload. Raises ValueError for anything but messages whose images are in the payload."""
    if not isinstance(payload, list):
        raise ValueError(f"{name} must be a list of messages, but it is {_shown(payload)}.")
    messages = [deserialize(message, f"{name}[{index}]") for index, message in enumerate(payload)]
    for index, message in enumerate(messages):
        _check_message(message, f"{name}[{index}]")
    if has_many_values(messages):
        raise ValueError(f"{name} must have at most {MOST_VALUES} values.")
    size = len(json.dumps(map_images(messages, lambda image: None), ensure_ascii=False))
    if size > MAX_TEXT:  # what no chat template shows has no limit of tokens, and is kept with its turn
        raise ValueError(f"{name} must have at most {MAX_TEXT} characters beside their images, but they have {size}.")
    _check_pixels(
        name, sum(image.width * image.height for image in images_of(messages) if isinstance(image, Image.Image))
    )
    return messages


def deserialize_answer(payload: Any, name: str) -> list[Message]:
    """As :func:`deserialize_messages`, of an env server. Raises ValueError also for too many pixels in encoded images."""
    messages = deserialize_messages(payload, name)
    _check_pixels(name, sum(map(_pixels, images_of(messages))))
    return messages


def _check_pixels(name: str, pixels: int) -> None:
    if pixels > MOST_PIXELS:
        raise ValueError(f"{name} must not show more than {MOST_PIXELS} pixels in all, but they show {pixels}.")


def _pixels(image: ImageSource) -> int:
    """The pixels that are decoded of an image, by its header. 0 for one that is refused: whoever shows it says why."""
    with suppress(ImageError):
        width, height = image_size(image)
        return width * height
    return 0


def serialize_task(task: Task) -> dict[str, Any]:
    """A task as JSON. ``images`` is ``None`` if they are those of the prompt, so that they are not sent twice.

    Raises:
        ValueError: a column is not plain data, or an image does not load.
    """
    names = [field.name for field in fields(task) if field.name not in ("prompt", "images")]
    payload = {name: serialize(getattr(task, name), f"task.{name}") for name in names}
    in_prompt = images_of(task.prompt)
    differ = len(in_prompt) != len(task.images) or any(a is not b for a, b in zip(in_prompt, task.images, strict=True))
    images = serialize([embed_image(image) for image in task.images], "task.images") if differ else None
    return {**payload, "prompt": serialize_messages(task.prompt, "task.prompt"), "images": images}


def deserialize_task(payload: Any) -> Task:
    """The task of a payload. Raises ValueError for a missing or unknown field, a wrong type, or an image by its path or URL."""
    types = {"id": str, "data": dict, "source": str, "seed": int, "part": str}
    names = sorted(field.name for field in fields(Task))
    if not isinstance(payload, dict) or sorted(payload) != names:
        given = sorted(payload) if isinstance(payload, dict) else _shown(payload)
        raise ValueError(f"task must have the fields {names}, but it has {given}.")
    prompt = deserialize_messages(payload["prompt"], "task.prompt")
    rest = {name: deserialize(payload[name], f"task.{name}") for name in ("answer", *types)}
    for name, kind in types.items():
        if type(rest[name]) is not kind:
            raise ValueError(f"task.{name} must be of type {kind.__name__}, but it is {_shown(rest[name])}.")
    images = deserialize(payload["images"], "task.images")
    if images is None:
        return Task(prompt=prompt, images=images_of(prompt), **rest)
    if not isinstance(images, list):
        raise ValueError(f"task.images must be a list or null, but it is {_shown(images)}.")
    for index, image in enumerate(images):
        check_embedded(image, f"task.images[{index}]")
    return Task(prompt=prompt, images=images, **rest)


def decoded_bytes(value: Any) -> int:
    """The memory that the images in a restored value take once they are decoded. The same image counts once."""
    images = {id(each): each for each in values_of(value) if isinstance(each, Image.Image)}
    return sum(image.width * image.height * (1 if image.mode in BYTE_MODES else 4) for image in images.values())


def checked_tools(payload: Any) -> list[dict[str, Any]]:
    """The tool schemas of a payload. Raises ValueError for anything but a list of dicts with names."""
    if not isinstance(payload, list):
        raise ValueError(f"tools must be a list, but it is {_shown(payload)}.")
    for index, tool in enumerate(payload):
        if not _has_name(tool):
            raise ValueError(f"tools[{index}] must be a dict with a name, but it is {_shown(tool)}.")
        _check_plain(tool, f"tools[{index}]")
    if has_many_values(payload):
        raise ValueError(f"tools must have at most {MOST_VALUES} values.")
    return payload


def _restore(marker: str, content: Any, name: str) -> Any:
    if marker == ESCAPED:
        if not isinstance(content, dict):
            raise ValueError(f"{name}.{ESCAPED} must be a dict, but it is {_shown(content)}.")
        return {key: deserialize(item, _inside(name, key)) for key, item in content.items()}
    if not isinstance(content, str) or (marker == FLOAT and content not in FLOATS):
        raise ValueError(
            f"{name}.{marker} must be {'text' if marker != FLOAT else list(FLOATS)}, but it is {_shown(content)}."
        )
    if marker == FLOAT:
        return FLOATS[content]
    try:
        encoded = base64.b64decode(content, validate=True)
        return encoded if marker == BYTES else _open_png(encoded)
    except (binascii.Error, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name}.{marker} does not decode: {error}.") from error


def _open_png(encoded: bytes) -> Image.Image:
    """The image, which is decoded when it is used."""
    image = Image.open(io.BytesIO(encoded), formats=("PNG",))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    return image


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{name} must be a dict with a role out of {', '.join(ROLES)}, but it is {_shown(message)}.")
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else []):
        _check_part(part, f"{name}.content[{index}]")
    if not (content is None or isinstance(content, list)):
        _check_text(content, f"{name}.content")
    _check_plain({key: value for key, value in message.items() if key != "content"}, name)
    calls = message.get("tool_calls")
    if not (calls is None or isinstance(calls, list)):
        raise ValueError(f"{name}.tool_calls must be a list, but it is {_shown(calls)}.")
    for call in calls or []:
        if not _has_name(call):
            raise ValueError(f"{name}.tool_calls must hold dicts with a name, but it holds {_shown(call)}.")


def _check_part(part: Any, name: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        _check_text(part.get("text"), f"{name}.text")
    elif kind == "image":
        check_embedded(part.get("image"), f"{name}.image")
    else:
        raise ValueError(f"{name} must be a dict of the type text or image, but it is {_shown(part)}.")
    _check_plain({key: value for key, value in part.items() if key != kind}, name)


def _check_text(text: Any, name: str) -> None:
    try:
        if not isinstance(text, str):
            raise ValueError(f"{name} must be text, but it is {_shown(text)}.")
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} cannot be encoded as UTF-8: {error}.") from error


def _check_plain(value: Any, name: str) -> None:
    """Raises ValueError for an image, bytes, or text that cannot be encoded, anywhere in ``value``."""
    if isinstance(value, str):
        _check_text(value, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, f"a key of {name}")
            _check_plain(item, _inside(name, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, _inside(name, index))
    elif not (value is None or isinstance(value, bool | int | float)):
        raise ValueError(f"{name} must be text, a number, a list or a dict, but it is {_shown(value)}.")


def _has_name(tool_or_call: Any) -> bool:
    function = tool_or_call.get("function", tool_or_call) if isinstance(tool_or_call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _inside(name: str, key: str | int) -> str:
    """The name of a value in errors: ``task.data.seed``. It is shortened, since each value has one, and keys may have megabytes."""
    if len(name) > LONG_NAME:
        return name
    return f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key:.{LONG_NAME}}"


def _shown(value: Any) -> str:
    return describe(value) if isinstance(value, bytes | str) else f"{value!r:.120}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
