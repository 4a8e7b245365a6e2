"""Loads the images of an env's answer to a reply. One that cannot be shown becomes a text that says why.

The policy may have chosen what the env made: a crop of 256x1 pixels is refused by the processor, and an address that a reply names may
not exist. Such an image is an error of the model, as a wrong call is, and must not end the trajectory. An image that the machine could
not read this time, or that is no image source at all, is an error of the env.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.env.session import EnvError
from vlmrl.multimodal.images import ImageError
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import ImageSource, MediaItem, Message


@dataclass(frozen=True)
class AnswerImages:
    """An answer whose images can all be shown."""

    messages: list[Message]
    items: dict[int, MediaItem]
    """By ``id`` of the image's source."""
    not_shown: int = 0
    """Number of images that a text stands for."""


async def load_answer_images(
    messages: Sequence[Message], store: MediaStore | None, seconds: float, where: str
) -> AnswerImages:
    """Load all images of ``messages``, each within ``seconds``. ``where`` names the turn in errors.

    An image that cannot be shown becomes ``[This image cannot be shown: it is 256x1 pixels, ...]``.

    Raises:
        EnvError: an image could not be read this time, or is no image source.
    """
    sources = {id(source): source for source in _sources(messages)}
    if store is None or not sources:
        return AnswerImages(list(messages), {})
    results = await asyncio.gather(*(_load(store, source, seconds) for source in sources.values()))
    items: dict[int, MediaItem] = {}
    texts: dict[int, str] = {}
    for key, result in zip(sources, results, strict=True):
        if isinstance(result, MediaItem):
            items[key] = result
        elif result.reason is not None:
            texts[key] = f"[This image cannot be shown: {result.reason}]"
        else:
            raise EnvError(f"{where}: {result}") from result
    if not texts:
        return AnswerImages(list(messages), items)
    count = sum(id(source) in texts for source in _sources(messages))
    return AnswerImages([_with_texts(message, texts) for message in messages], items, count)


async def _load(store: MediaStore, source: ImageSource, seconds: float) -> MediaItem | ImageError:
    try:
        return await store.get(source, seconds)
    except ImageError as error:
        return error


def _sources(messages: Sequence[Message]) -> Iterator[ImageSource]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part["image"] for part in content if _is_image(part))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and "image" in part


def _with_texts(message: Message, texts: dict[int, str]) -> Message:
    """A copy of the message with texts in place of the images whose sources' ids they have."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part, following in zip(content, [*content[1:], None], strict=True):
        text = texts.get(id(part["image"])) if _is_image(part) else None
        if text is None:
            parts.append(part)
        else:
            after = following.get("text", "") if isinstance(following, dict) else "\n"
            parts.append({"type": "text", "text": text if after.startswith("\n") else text + "\n"})
    return {**message, "content": parts}
