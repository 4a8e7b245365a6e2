"""Image sources: loading them, and telling them apart. The media store and envs use it."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from PIL import ExifTags, Image, ImageOps

from vlmrl.types import ImageSource

ANY_SIZE = {"min_pixels": 1, "max_pixels": 2**62}
URL_TIMEOUT = 20  # seconds, to connect and between bytes
_DECODING = threading.Lock()  # a PIL image that was opened, but not yet read, breaks when two threads read it


def load_image(source: ImageSource) -> Image.Image:
    """Any :data:`ImageSource` as an RGB image of its own size, upright; transparency becomes white."""
    from qwen_vl_utils import fetch_image

    source = _content(source)
    with _naming(source):
        image = _open(source)
        if isinstance(image, Image.Image):
            image = _upright(image)
            if image.has_transparency_data:
                image = image.convert("RGBA")  # the one mode that fetch_image puts on white
        # Half a patch times the merge size is a factor of one: the size is left to the processor's own rule.
        return fetch_image({"image": image, **ANY_SIZE}, image_patch_size=0.5)


def data_uri(source: ImageSource) -> str:
    """Any :data:`ImageSource` as a data URI, to be sent elsewhere: encoded bytes as they are, all else as PNG."""
    source = _content(source)
    if isinstance(source, str) and source.startswith("data:"):
        return source
    with _naming(source):
        content = _encoded(source)
        kind = Image.open(io.BytesIO(content)).get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _encoded(source: ImageSource) -> bytes:
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path) and not str(source).startswith(("http://", "https://")):
        return Path(str(source).removeprefix("file://")).read_bytes()
    buffer = io.BytesIO()
    load_image(source).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def image_size(source: ImageSource) -> tuple[int, int]:
    """Width and height of the image that :func:`load_image` gives, from the file's header where it has one."""
    source = _content(source)
    with _naming(source):
        image = _open(source)
        if not isinstance(image, Image.Image):
            return load_image(source).size
        width, height = image.size
        exif = image.getexif() if "exif" in image.info else {}  # asked otherwise, a PNG would be decoded
        turned = exif.get(ExifTags.Base.Orientation, 1) >= 5  # by a quarter
        return (height, width) if turned else (width, height)


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its camera says. Raises ValueError for more than 8 bits a channel, which would be clipped, not scaled."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"mode {image.mode} holds more than 8 bits a channel; scale it to 0..255 first, for example with numpy."
        )
    return ImageOps.exif_transpose(image)


def source_key(source: ImageSource) -> str:
    """A key that is equal for equal sources and costs no decoding."""
    source = _content(source)
    with _naming(source):
        return _key(source)


def _key(source: ImageSource) -> str:
    if isinstance(source, Image.Image):
        return "pixels:" + content_hash(source)
    if isinstance(source, bytes):
        return "bytes:" + hashlib.blake2b(source, digest_size=16).hexdigest()
    text = str(source)
    if text.startswith(("http://", "https://", "data:")):
        return text if len(text) < 200 else "text:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path = Path(text.removeprefix("file://"))
    stamp = path.stat() if path.is_file() else None
    return f"file:{path.absolute()}:{stamp and (stamp.st_mtime_ns, stamp.st_size)}"


def content_hash(image: Image.Image) -> str:
    """A hash of mode, size, orientation, pixels and their palette: the same for two encodings of one image."""
    with _DECODING:
        image.load()
    turned = image.getexif().get(ExifTags.Base.Orientation)
    meaning = (image.mode, image.size, image.getpalette(None), image.info.get("transparency"), turned)
    digest = hashlib.blake2b(repr(meaning).encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _content(source: ImageSource) -> ImageSource:
    """The Hugging Face form without its dict."""
    return (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source


def _open(source: ImageSource) -> ImageSource:
    """A PIL image, except for what no image can be loaded from, which is left to fetch_image to refuse."""
    if isinstance(source, str) and source.startswith("data:") and "base64," in source:
        source = base64.b64decode(source.partition("base64,")[2])
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source))
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        answer = requests.get(source, timeout=URL_TIMEOUT)
        answer.raise_for_status()
        return Image.open(io.BytesIO(answer.content))
    if isinstance(source, str | Path):
        return Image.open(str(source).removeprefix("file://"))
    if isinstance(source, Image.Image):
        with _DECODING:
            source.load()
    return source


@contextmanager
def _naming(source: ImageSource) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"an image does not load: {describe(source)}: {error}") from error


def describe(source: ImageSource) -> str:
    """The source in a few words, for an error."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes beginning with {source[:8]!r}"
    text = repr(source)
    return text if len(text) < 120 else text[:117] + "..."


def blank(image: Image.Image) -> Image.Image:
    """A grey image of the same size: a control that shows what can be done without seeing."""
    return Image.new("RGB", image.size, (128, 128, 128))
