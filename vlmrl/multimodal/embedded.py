"""Images that cross from one process to another: their content, never a path or a URL.

What comes from another process is data. If it could name a path or a URL as an image, it could make this machine read any file and
reach any address.
"""

from __future__ import annotations

import base64
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.multimodal.fetch import fetch, is_url
from vlmrl.multimodal.images import DecodedImage, content_of, describe, encode_png, mime_type, naming, read_image_file
from vlmrl.multimodal.messages import values_of
from vlmrl.utils.http import http_loop
from vlmrl.utils.kept import Kept
from vlmrl.utils.threads import SingleFlight
from vlmrl.utils.work_pool import SharedTasks

DATA_URI = re.compile(r"data:image/[A-Za-z0-9.+-]+;base64,[A-Za-z0-9+/]+={0,2}")

KEPT_BYTES = 128 * 2**20  # of downloads, and as many of PNGs: the members of a group send the same images
_DOWNLOADED: Kept[bytes] = Kept(KEPT_BYTES, len)
_PNGS: Kept[bytes] = Kept(KEPT_BYTES, len)
_ENCODING: SingleFlight[bytes] = SingleFlight()
_FETCHING = SharedTasks()


def is_data_uri(text: str) -> bool:
    """Whether ``text`` holds an image's bytes: ``data:image/png;base64,...``."""
    return DATA_URI.fullmatch(text) is not None


def check_embedded(image: Any, name: str) -> None:
    """Raises ValueError unless ``image``, which another process sent, is pixels, encoded bytes or a data URI."""
    if not isinstance(image, Image.Image | DecodedImage | bytes) and not (
        isinstance(image, str) and is_data_uri(image)
    ):
        raise ValueError(
            f"{name} must be pixels, encoded bytes or a data URI (data:image/...;base64,...), but it is {describe(image)}: an image "
            "from another process is never opened by a path or a URL."
        )


def embed_image(source: Any) -> Any:
    """An image source that is valid on another machine: a path or a URL becomes the encoded bytes. Raises ValueError."""
    source = content_of(source)
    if not isinstance(source, str | Path) or is_data_uri(str(source)):
        return source
    if is_url(source):
        return http_loop().wait(_fetched(str(source)))
    if str(source).startswith("data:"):
        content = base64.b64decode(str(source).partition("base64,")[2])
        if not content:
            raise ValueError(
                f"an image does not load: {describe(source)}: a data URI must have the form data:image/...;base64,..."
            )
        return content
    with naming(source):
        return read_image_file(source)


async def fetch_embedded(source: Any) -> Any:
    """The encoded bytes of a source that is a URL, fetched once while it is kept; others as they are. Raises ImageError."""
    content = content_of(source)
    return await http_loop().run(_fetched(str(content))) if is_url(content) else source


def encode_once(image: DecodedImage) -> bytes:
    """The image as PNG. Images with the same pixels are encoded once while their PNG is kept."""
    return _ENCODING.get(image.id, _PNGS.get, lambda: _PNGS.keep(image.id, encode_png(image.image)))[0]


async def _fetched(url: str) -> bytes:
    """In the process's loop for images."""
    kept = _DOWNLOADED.get(url)
    return kept if kept is not None else await _FETCHING.get(url, lambda: _download(url))


async def _download(url: str) -> bytes:
    with naming(url):
        content = await fetch(url)
        mime_type(content)
    return _DOWNLOADED.keep(url, content)


Refuse = Callable[[Any], None]
"""Raises ValueError for an image source that may not be opened."""


def refusing_sources_of(payload: Any) -> Refuse:
    """For a server: a function that raises ValueError for an image source that is a string in a client's ``payload``.

    ``payload`` is what the client's request was restored to. Its strings have any length: a URL may be long, and so may a path, of
    which ``pathlib`` opens ``a/././b`` as ``a/b``.
    """
    texts = (each for each in values_of(payload) if isinstance(each, str))
    named = {_place(text) for text in texts if not is_data_uri(text)}

    def refuse(source: Any) -> None:
        path = (source.get("path") if not source.get("bytes") else None) if isinstance(source, dict) else source
        if isinstance(path, str | Path) and not is_data_uri(str(path)) and _place(str(path)) in named:
            raise ValueError(
                f"an image must not be opened by a path or URL that the client sent ({describe(str(path))}): map the column to the "
                "task's images, whose pixels are sent."
            )

    return refuse


def _place(source: str) -> str:
    """One form for the spellings of a path: ``file:///a/./b`` is ``/a/b``."""
    return os.path.normpath(source.removeprefix("file://"))
