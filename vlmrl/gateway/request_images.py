"""The images of an episode's requests. Every request of a conversation repeats them: each is decoded and loaded once."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from vlmrl.config.gateway import Gateway
from vlmrl.gateway.chat import ChatError
from vlmrl.gateway.request_body import refuse
from vlmrl.multimodal.fetch import MAX_BYTES, SECONDS, fetch, is_url
from vlmrl.multimodal.images import ImageError, ImageUnavailableError, frozen_image
from vlmrl.multimodal.messages import images_of, map_images
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import ImageSource, MediaItem, Message
from vlmrl.utils.http import RefusedError, RetryableError, http_loop
from vlmrl.utils.output_files import LONGEST_PATH, open_regular
from vlmrl.utils.work_pool import DeadlineError, cpu_pool, usable_cores

MAX_NEW_IMAGES = 1024  # of one request
MOST_FETCHED = 8  # of one episode at once: each URL may have 64 MiB, which are kept until they are decoded
LONGEST_ADDRESS = 3 * LONGEST_PATH
"""Characters of a path or file URL, in which one may be `%20`. An image as base64 without `data:` has slashes, as a path has."""
KEPT_IMAGES = 1024  # of one episode; their pixels are in the store's memory, which has its own bound


@dataclass(frozen=True, eq=False)
class NewImage:
    """An image of a request that is not loaded yet: where it is in the request, and its bytes, path or URL."""

    where: str
    source: bytes | Path | str
    digest: bytes | None = None  # of the encoded text; None: its content may change


class RequestImages:
    """Reads the images of one episode's requests. ``embedded`` and ``named`` may be called in any thread.

    An image that the client embedded is known by a digest of its text, so that it is neither decoded nor loaded again.
    """

    def __init__(self, store: MediaStore | None, settings: Gateway) -> None:
        self._store = store
        self._hosts = settings.image_hosts
        self._folders = [Path(folder).resolve() for folder in settings.image_folders]
        self._items: dict[bytes, MediaItem] = {}  # by digest, oldest first
        self._fetching = asyncio.Semaphore(MOST_FETCHED)
        self._share = asyncio.Semaphore(max(1, usable_cores() // 2))  # of the threads, which all episodes share

    def read(self, address: str, where: str) -> NewImage | MediaItem:
        """The image of a data URI, a URL or a path. Raises ChatError unless the settings allow it."""
        if address.startswith("data:"):
            header, _, text = address.partition(",")
            if not header.endswith(";base64"):
                refuse(where, "a data URI with base64, such as data:image/png;base64,...", address)
            return self.embedded(text, where)
        if is_url(address):
            if not self._hosts:
                remedy = "the run loads no URLs; embed the image, or add urls to gateway.images"
                refuse(where, "a data URI", address, remedy)
            return NewImage(where, address)
        return NewImage(where, self._named_file(address, where))

    def embedded(self, text: str, where: str) -> NewImage | MediaItem:
        """The image of a base64 text."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        item = self._items.get(digest)
        if item is not None:
            return item
        try:
            content = base64.b64decode("".join(text.split()) if "\n" in text else text, validate=True)
        except (binascii.Error, ValueError):
            content = b""
        if not content:
            refuse(where, "base64 of an image", text)
        return NewImage(where, content, digest)

    def _named_file(self, address: str, where: str) -> Path:
        """The path that an address names, which :meth:`_read_file` looks at in a thread."""
        if self._folders and len(address) <= LONGEST_ADDRESS:
            with suppress(ValueError):  # `file://[`
                path = Path(unquote(urlsplit(address).path) if address.startswith("file:") else address)
                if path.is_absolute():
                    return path
        _refuse_address(address, where)

    async def load(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a loaded image in place of each new one.

        An image that decodes, but that the model's processor refuses, such as one of 256x1 pixels, stays as it came: the episode
        decides about it, since the policy may have chosen it. Raises ChatError for an image that does not decode, and where the model
        reads no images.
        """
        new = {id(image): image for image in images_of(messages) if isinstance(image, NewImage)}
        if not new:
            return list(messages)
        if self._store is None:
            where = next(iter(new.values())).where
            raise ChatError(400, where, f"{where} must be left out: the model reads text only.")
        if len(new) > MAX_NEW_IMAGES:
            where = list(new.values())[MAX_NEW_IMAGES].where
            raise ChatError(400, where, f"{where} must be left out: a request may have {MAX_NEW_IMAGES} new images.")
        loading = [asyncio.create_task(self._load(image)) for image in new.values()]
        try:
            loaded = await asyncio.gather(*loading)
        finally:  # of a request that is refused, nothing more is fetched
            for task in loading:
                task.cancel()
        shown = dict(zip(new, loaded, strict=True))
        return map_images(messages, lambda image: shown.get(id(image), image))

    async def _load(self, image: NewImage) -> ImageSource:
        assert self._store is not None
        try:
            async with nullcontext() if isinstance(image.source, bytes) else self._fetching:
                source = await self._content(image)
                async with self._share:
                    item = await self._store.get(source, SECONDS)
        except (ImageUnavailableError, RetryableError, DeadlineError) as error:
            raise ChatError(503, "image_url", f"{image.where} could not be loaded this time: {error}") from error
        except RefusedError as error:
            raise ChatError(400, image.where, f"{image.where} cannot be loaded: {error}"[:500]) from error
        except ImageError as error:
            if error.reason is not None and await _decodes(source):
                return source
            message = f"{image.where} must be an image that decodes, but {error}"
            raise ChatError(400, image.where, message[:500]) from error
        if image.digest is not None:
            self._items[image.digest] = item
            while len(self._items) > KEPT_IMAGES:
                self._items.pop(next(iter(self._items)), None)
        return item

    async def _content(self, image: NewImage) -> bytes:
        if isinstance(image.source, str):
            return await http_loop().run(fetch(image.source, SECONDS, self._hosts))
        if isinstance(image.source, Path):
            return await cpu_pool().run(SECONDS, self._read_file, image.source, image.where)
        return image.source

    def _read_file(self, path: Path, where: str) -> bytes:
        """The file of a path, links followed, if it is in one of the allowed folders.

        Meanwhile a link may take its place, of an agent in a container that shares the folder.
        """
        try:
            file = Path(os.path.realpath(path))  # Path.resolve raises where links go in circles
            folder = next((each for each in self._folders if file.is_relative_to(each)), None)
            if folder is None:
                _refuse_address(str(path), where)
            with open_regular(file, folder) as opened:
                content = opened.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise RefusedError(str(error)) from error
        if len(content) > MAX_BYTES:
            raise RefusedError(f"its file has more than {MAX_BYTES} bytes")
        return content


def _refuse_address(address: str, where: str) -> NoReturn:
    remedy = "embed the image, or name its folder in gateway.images"
    refuse(where, "a data URI, or an absolute path in a folder of gateway.images", address, remedy)


def new_bytes(messages: Sequence[Message]) -> int:
    """The bytes of the embedded images that are not loaded yet."""
    new = [image for image in images_of(messages) if isinstance(image, NewImage)]
    return sum(len(image.source) for image in new if isinstance(image.source, bytes))


async def _decodes(source: bytes) -> bool:
    """Whether the model's processor, and not the image, is why it does not load."""
    try:
        await cpu_pool().run(SECONDS, frozen_image, source)
    except Exception:
        return False
    return True
