"""Loads the images of messages, and replaces their sources, which may then be freed.

An image of an env's answer to a response that cannot be shown becomes a text that says why. The policy may have chosen what the env
made: a crop of 256x1 pixels is refused by the processor, and an address or a file that a response names may not exist. Such an image
is an error of the model, as a wrong call is, and must not end the trajectory. An image that the machine could not read this time, a
missing file that no response named, or what is no image source at all, is an error of the env.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.env.session import EnvError
from vlmrl.multimodal.images import ImageError, content_of
from vlmrl.multimodal.messages import images_of, is_image, map_images
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import ImageSource, MediaItem, Message
from vlmrl.utils.folders import working_directory


async def load_images(messages: Sequence[Message], store: MediaStore | None, seconds: float) -> list[Message]:
    """``messages`` with a :class:`MediaItem` in place of each image source, each loaded within ``seconds``.

    Without a ``store``, the model reads text only and its renderer refuses images. Raises as :meth:`MediaStore.get`.
    """
    if store is None:
        return list(messages)
    sources = _sources(messages)
    items = await asyncio.gather(*(store.get(source, seconds) for source in sources.values()))
    loaded = dict(zip(sources, items, strict=True))
    return map_images(messages, lambda source: loaded[id(source)])


async def load_answer_images(
    messages: Sequence[Message],
    store: MediaStore | None,
    seconds: float,
    where: str,
    *,
    line: Callable[[], str] = str,
    responses: Sequence[str] | None = None,
) -> tuple[list[Message], int]:
    """As :func:`load_images`, for an env's answer; ``where`` and ``line()`` name the turn and the env's line in errors. Also returns
    how many images are not shown.

    An image that cannot be shown becomes ``[This image cannot be shown: it is 256x1 pixels, ...]``. A response may have chosen a
    missing file ("page 12"), and must not be able to fail its group; but not the folder, unless one of ``responses`` has its name, or
    ``responses`` is ``None``.

    Raises:
        EnvError: an image could not be read this time, is no image source, or is in a folder that does not exist.
    """
    if store is None:
        return list(messages), 0
    sources = _sources(messages)
    results = await asyncio.gather(*(_load(store, source, seconds) for source in sources.values()))
    shown: dict[int, MediaItem | str] = {}
    for key, result in zip(sources, results, strict=True):
        if isinstance(result, MediaItem):
            shown[key] = result
        elif responses is not None and _names_no_file(result, sources[key], responses):
            raise EnvError(
                f"{where}: {result}{line()}. Return a path that exists; a relative one starts in {working_directory()}. If a response "
                "chooses the file, check that it exists, and answer with a text if it does not."
            ) from result
        elif result.reason is not None:
            shown[key] = f"[This image cannot be shown: {result.reason}]"
        else:
            raise EnvError(f"{where}: {str(result).removesuffix('.')}{line()}.") from result
    count = sum(isinstance(shown[id(source)], str) for source in images_of(messages))
    return [_replaced_in(message, shown) if images_of([message]) else message for message in messages], count


async def _load(store: MediaStore, source: ImageSource, seconds: float) -> MediaItem | ImageError:
    try:
        return await store.get(source, seconds)
    except ImageError as error:
        return error


def _names_no_file(error: ImageError, source: ImageSource, responses: Sequence[str]) -> bool:
    """Whether a file is missing, in a folder that does not exist and that no response can have chosen: by its name, or by a number."""
    if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
        return False
    path = Path(str(content_of(source)).removeprefix("file://"))
    missing = next((folder.name.casefold() for folder in reversed(path.parents) if not folder.is_dir()), None)
    if missing is None or any(character.isdigit() for character in missing):
        return False
    return not any(missing in response.casefold() for response in responses)


def _sources(messages: Sequence[Message]) -> dict[int, ImageSource]:
    """The distinct image sources, by ``id``."""
    return {id(source): source for source in images_of(messages)}


def _replaced_in(message: Message, shown: Mapping[int, MediaItem | str]) -> Message:
    """A copy with ``shown`` in place of the image sources, by their ids: loaded images, or texts."""
    content = message["content"]
    parts: list[Any] = []
    for part, following in zip(content, [*content[1:], None], strict=True):
        loaded = shown[id(part["image"])] if is_image(part) else None
        if loaded is None:
            parts.append(part)
        elif isinstance(loaded, MediaItem):
            parts.append({**part, "image": loaded})
        else:
            after = following.get("text", "") if isinstance(following, dict) else "\n"
            parts.append({"type": "text", "text": loaded if after.startswith("\n") else loaded + "\n"})
    return {**message, "content": parts}
