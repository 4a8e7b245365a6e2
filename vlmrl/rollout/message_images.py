"""Loads the images of messages, and puts the loaded images in place of their sources, which may then be freed.

An image of an env's answer to a response that cannot be shown becomes a text that says why. The policy may have chosen what the env
made: a crop of 256x1 pixels is refused by the processor, and an address that a response names may not exist. Such an image is an error
of the model, as a wrong call is, and must not end the trajectory. An image that the machine could not read this time, or that is no
image source at all, is an error of the env.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.env.session import EnvError
from vlmrl.multimodal.images import ImageError
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import ImageSource, MediaItem, Message


async def load_images(messages: Sequence[Message], store: MediaStore | None, seconds: float) -> list[Message]:
    """``messages`` with a :class:`MediaItem` in place of each image source, each loaded within ``seconds``.

    Without a ``store``, the model reads text only and its renderer refuses images. Raises as :meth:`MediaStore.get`.
    """
    if store is None:
        return list(messages)
    sources = _sources(messages)
    items = await asyncio.gather(*(store.get(source, seconds) for source in sources.values()))
    return _replaced(messages, dict(zip(sources, items, strict=True)))


async def load_answer_images(
    messages: Sequence[Message], store: MediaStore | None, seconds: float, where: str
) -> tuple[list[Message], int]:
    """As :func:`load_images`, for an env's answer; ``where`` names the turn in errors. Also returns how many images are not shown.

    An image that cannot be shown becomes ``[This image cannot be shown: it is 256x1 pixels, ...]``.

    Raises:
        EnvError: an image could not be read this time, or is no image source.
    """
    if store is None:
        return list(messages), 0
    sources = _sources(messages)
    results = await asyncio.gather(*(_load(store, source, seconds) for source in sources.values()))
    shown: dict[int, MediaItem | str] = {}
    for key, result in zip(sources, results, strict=True):
        if isinstance(result, MediaItem):
            shown[key] = result
        elif result.reason is not None:
            shown[key] = f"[This image cannot be shown: {result.reason}]"
        else:
            raise EnvError(f"{where}: {result}") from result
    count = sum(isinstance(shown[id(part["image"])], str) for message in messages for part in _image_parts(message))
    return _replaced(messages, shown), count


async def _load(store: MediaStore, source: ImageSource, seconds: float) -> MediaItem | ImageError:
    try:
        return await store.get(source, seconds)
    except ImageError as error:
        return error


def _sources(messages: Sequence[Message]) -> dict[int, ImageSource]:
    """The distinct image sources, by ``id``."""
    return {id(part["image"]): part["image"] for message in messages for part in _image_parts(message)}


def _image_parts(message: Message) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    return (part for part in content if _is_image(part)) if isinstance(content, list) else iter(())


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and "image" in part


def _replaced(messages: Sequence[Message], shown: Mapping[int, MediaItem | str]) -> list[Message]:
    """Copies of the messages with ``shown`` in place of their image sources, by the sources' ids: loaded images, or texts."""
    return [_replaced_in(message, shown) if any(_image_parts(message)) else message for message in messages]


def _replaced_in(message: Message, shown: Mapping[int, MediaItem | str]) -> Message:
    content = message["content"]
    parts: list[Any] = []
    for part, following in zip(content, [*content[1:], None], strict=True):
        loaded = shown[id(part["image"])] if _is_image(part) else None
        if loaded is None:
            parts.append(part)
        elif isinstance(loaded, MediaItem):
            parts.append({**part, "image": loaded})
        else:
            after = following.get("text", "") if isinstance(following, dict) else "\n"
            parts.append({"type": "text", "text": loaded if after.startswith("\n") else loaded + "\n"})
    return {**message, "content": parts}
