"""Images that cross from one process to another: their content, never a path or a URL.

What comes from another process is data. If it could name a path or a URL as an image, it could make this machine read any file and
reach any address.
"""

from __future__ import annotations

import base64
import os.path
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.multimodal.fetch import is_url
from vlmrl.multimodal.images import data_uri, describe
from vlmrl.utils.threads import SingleFlight

DATA_URI = re.compile(r"data:image/[A-Za-z0-9.+-]+;base64,[A-Za-z0-9+/]+={0,2}")

KEPT_BYTES = 128 * 2**20
_DOWNLOADED: dict[
    str, bytes
] = {}  # by URL, oldest first, up to KEPT_BYTES: the members of a group send the same images
_FLIGHT: SingleFlight[bytes] = SingleFlight()

Embed = Callable[[Any], Any]
"""Replaces an image source by what is sent: pixels, encoded bytes or a data URI."""


def is_data_uri(text: str) -> bool:
    """Whether ``text`` holds an image's bytes: ``data:image/png;base64,...``."""
    return DATA_URI.fullmatch(text) is not None


def check_embedded(image: Any, name: str) -> None:
    """Raises ValueError unless ``image``, which another process sent, is pixels, encoded bytes or a data URI."""
    if not isinstance(image, Image.Image | bytes) and not (isinstance(image, str) and is_data_uri(image)):
        raise ValueError(
            f"{name} must be pixels, encoded bytes or a data URI (data:image/...;base64,...), but it is {describe(image)}: an image "
            "from another process is never opened by a path or a URL."
        )


def embed_image(source: Any) -> Any:
    """An image source that is valid on another machine: a path or a URL becomes the encoded bytes. Raises ValueError."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if not isinstance(source, str | Path) or is_data_uri(str(source)):
        return source
    content, _ = _FLIGHT.get(str(source), _DOWNLOADED.get, lambda: _content(str(source)))
    if not content:
        raise ValueError(
            f"an image does not load: {describe(source)}: a data URI must have the form data:image/...;base64,..."
        )
    return content


def _content(source: str) -> bytes:
    content = base64.b64decode(data_uri(source).partition("base64,")[2])
    if is_url(source):
        _DOWNLOADED[source] = content
        while sum(map(len, list(_DOWNLOADED.values()))) > KEPT_BYTES:
            _DOWNLOADED.pop(next(iter(list(_DOWNLOADED)), ""), None)
    return content


def without_sources_of(payload: Any) -> Embed:
    """:func:`embed_image` for a server: it refuses, by a ValueError, every path or URL that is a string in a client's ``payload``.

    ``payload`` is what the client's request was restored to. Its strings have any length: a URL may be long, and so may a path, of
    which ``pathlib`` opens ``a/././b`` as ``a/b``.
    """
    named = {_place(text) for text in _strings(payload) if not is_data_uri(text)}

    def embed(source: Any) -> Any:
        path = (source.get("path") if not source.get("bytes") else None) if isinstance(source, dict) else source
        if isinstance(path, str | Path) and not is_data_uri(str(path)) and _place(str(path)) in named:
            raise ValueError(
                f"an image must not be opened by a path or URL that the client sent ({describe(str(path))}): map the column to the "
                "task's images, whose pixels are sent."
            )
        return embed_image(source)

    return embed


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            yield from _strings(item)


def _place(source: str) -> str:
    """One form for the spellings of a path: ``file:///a/./b`` is ``/a/b``."""
    return os.path.normpath(source.removeprefix("file://"))
