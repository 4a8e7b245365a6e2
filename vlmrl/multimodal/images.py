"""Image sources: load them, hash their content, measure them, and encode them as PNG or as a data URI."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import ExifTags, Image, ImageOps

from vlmrl.types import ImageSource

PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
ANY_SIZE = {"min_pixels": 1, "max_pixels": 2**62}
URL_TIMEOUT = 20  # seconds, to connect and between two chunks
_DECODING = threading.Lock()  # PIL decodes an opened image at its first use, which is not thread-safe


def load_image(source: ImageSource) -> Image.Image:
    """Any :data:`ImageSource` as an upright RGB image of its own size; transparency becomes white. Raises ValueError."""
    from qwen_vl_utils import fetch_image

    source = _content(source)
    with _naming(source):
        image = _open(source)
        if isinstance(image, Image.Image):
            image = _upright(image)
            if image.has_transparency_data:
                image = image.convert("RGBA")  # the only mode that fetch_image puts on white
        # fetch_image rounds sizes to a multiple of 2 * image_patch_size: 0.5 leaves the size to the model's own processor.
        return fetch_image({"image": image, **ANY_SIZE}, image_patch_size=0.5)


def data_uri(source: ImageSource) -> str:
    """Any :data:`ImageSource` as a data URI: encoded bytes and files as they are, all else as PNG."""
    source = _content(source)
    if isinstance(source, str) and source.startswith("data:"):
        return source
    with _naming(source):
        content = _encoded(source)
        kind = Image.open(io.BytesIO(content)).get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def encode_png(image: Image.Image) -> bytes:
    """The image as a PNG file, its EXIF orientation kept; a mode that PNG lacks, such as CMYK, becomes RGB."""
    buffer = io.BytesIO()
    kept = image if image.mode in PNG_MODES else image.convert("RGB")
    kept.save(buffer, format="PNG", compress_level=1, exif=image.getexif())
    return buffer.getvalue()


def png_data_uri(image: Image.Image) -> str:
    """:func:`encode_png` as a data URI."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()


def _encoded(source: ImageSource) -> bytes:
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path) and not str(source).startswith(("http://", "https://")):
        return Path(str(source).removeprefix("file://")).read_bytes()
    return encode_png(load_image(source))


def image_size(source: ImageSource) -> tuple[int, int]:
    """Width and height of the image that :func:`load_image` returns; files and bytes are not decoded for it."""
    source = _content(source)
    with _naming(source):
        image = _open(source)
        if not isinstance(image, Image.Image):
            return load_image(source).size
        width, height = image.size
        exif = image.getexif() if "exif" in image.info else {}  # without this condition, a PNG would be decoded
        sideways = exif.get(ExifTags.Base.Orientation, 1) >= 5  # rotated by 90 or 270 degrees
        return (height, width) if sideways else (width, height)


def _upright(image: Image.Image) -> Image.Image:
    """Rotated as its EXIF orientation says. Raises ValueError for more than 8 bits a channel: PIL would clip, not scale."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"mode {image.mode} holds more than 8 bits a channel; scale it to 0..255 first, for example with numpy."
        )
    return ImageOps.exif_transpose(image)


def source_key(source: ImageSource) -> str:
    """A key that is equal for equal sources, made without decoding encoded images."""
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
    """A hash of mode, size, orientation, palette and pixels: equal for two encodings of one image."""
    with _DECODING:
        image.load()
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    meaning = (image.mode, image.size, image.getpalette(None), image.info.get("transparency"), orientation)
    digest = hashlib.blake2b(repr(meaning).encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _content(source: ImageSource) -> ImageSource:
    """The bytes or path inside the Hugging Face ``datasets`` form; other sources as they are."""
    return (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source


def _open(source: ImageSource) -> ImageSource:
    """A PIL image. Anything that is no image source is returned as it is: fetch_image then raises the error."""
    if isinstance(source, str) and source.startswith("data:") and "base64," in source:
        source = base64.b64decode(source.partition("base64,")[2])
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source))
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        response = httpx.get(source, timeout=URL_TIMEOUT, follow_redirects=True).raise_for_status()
        return Image.open(io.BytesIO(response.content))
    if isinstance(source, str | Path):
        return Image.open(str(source).removeprefix("file://"))
    if isinstance(source, Image.Image):
        with _DECODING:
            source.load()
    return source


@contextmanager
def _naming(source: ImageSource) -> Iterator[None]:
    """Within the context, errors become ValueErrors that name the source."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"an image does not load: {describe(source)}: {error}") from error


def describe(source: ImageSource) -> str:
    """A short text for the source, for error messages."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes beginning with {source[:8]!r}"
    text = repr(source)
    return text if len(text) < 120 else text[:117] + "..."


def blank(image: Image.Image) -> Image.Image:
    """A grey image of the same size: a control for whether a run learns from its images."""
    return Image.new("RGB", image.size, (128, 128, 128))
