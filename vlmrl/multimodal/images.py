"""Image sources: load them, hash their content, measure them, and encode them as PNG or as a data URI."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from vlmrl.multimodal.fetch import fetch, is_url
from vlmrl.types import ImageSource, MediaItem
from vlmrl.utils.http import RefusedError, RetryableError, http_loop

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are decoded. PIL knows more: for some, a few KB take minutes or gigabytes, and for one it runs Ghostscript."""
MAX_PIXELS = 2**26
"""The largest width * height that is decoded: 67 million, about 0.7 GiB of memory while it is."""
MOST_PIXELS = 4 * MAX_PIXELS
"""Of all images in one answer of another process, which are decoded at once: 768 MiB."""
MAX_FILE_BYTES = 2**29
"""The largest file that is read whole, to be sent: 512 MiB, more than MAX_PIXELS take without compression."""
ORIENTED = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
"""Of a PIL image's ``info``: where a file may say how its image is rotated."""
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
MAX_SCANS = 100
"""Of a JPEG. Each is a pass over all its pixels and takes ten bytes; progressive ones have about ten."""
# The beginning of a scan of one to four components.
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
MAX_EXIF = 100
"""Segments of EXIF in a JPEG, for each of which PIL copies those before it. A camera writes one for each image."""
# PIL decodes an opened image at its first use, which is not thread-safe.
_DECODING = [threading.Lock() for _ in range(64)]
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


class ImageError(ValueError):
    """An image that cannot be loaded or shown.

    ``reason`` is what a model may read about an image that an env made for it: the same text in every process, without an address or
    path. ``None``: the image is not at fault, but the code that passed it or the machine.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class ImageUnavailableError(ImageError):
    """An image that could not be read this time; another attempt may succeed."""


class _SourceError(TypeError):
    """No :data:`ImageSource`, but ``value``."""

    def __init__(self, value: object) -> None:
        remedy = ": pass PIL.Image.fromarray(array)" if isinstance(value, np.ndarray) else ""
        super().__init__(
            f"an image is a PIL image, bytes, a path, a URL or a data URI, not a {type(value).__name__}{remedy}."
        )


class _UnfitError(ValueError):
    """What is wrong with an image, in words that a model may read."""


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A frozen image: an immutable :data:`ImageSource`, decoded and hashed once."""

    id: str
    """:func:`content_hash` of the RGB image."""
    pixels: np.ndarray
    """uint8 ``[height, width, 3]``, read-only."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        height, width, _ = self.pixels.shape
        return width, height

    @property
    def image(self) -> Image.Image:
        """As a PIL image, made for this call."""
        return Image.fromarray(self.pixels)

    def __repr__(self) -> str:
        return f"<DecodedImage {self.id} size={self.size[0]}x{self.size[1]}>"


def frozen_image(source: ImageSource) -> DecodedImage:
    """The image as it is now, of a source that is no URL: upright RGB; transparency becomes white. Raises as :func:`load_image`."""
    with naming(source):
        upright = _upright(_loaded(_open(source)))
        is_plain = upright.mode == "RGB" and not upright.has_transparency_data
        rgb = upright if is_plain else _to_rgb(upright)
        content = rgb.tobytes()
        pixels = np.frombuffer(content, np.uint8).reshape(rgb.height, rgb.width, 3)
        return DecodedImage(_content_hash(rgb, content), pixels)


def load_image(source: ImageSource) -> Image.Image:
    """Any :data:`ImageSource` as an upright RGB image of its own size; transparency becomes white.

    Raises:
        ImageError: it is no image in one of FORMATS, or has more than MAX_PIXELS; a ValueError.
        ImageUnavailableError: its address did not answer in time.
    """
    with naming(source):
        return decode(_fetched(source))


def decode(source: ImageSource) -> Image.Image:
    """As :func:`load_image`, of a source that is no URL; errors do not name it."""
    if isinstance(source, DecodedImage):
        return source.image
    return _to_rgb(_upright(_loaded(_open(source))))


def _to_rgb(image: Image.Image) -> Image.Image:
    from qwen_vl_utils.vision_process import to_rgb

    if image.has_transparency_data:
        image = image.convert("RGBA")  # the only mode that to_rgb puts on white
    return to_rgb(image)


def data_uri(source: ImageSource) -> str:
    """Any :data:`ImageSource` as a data URI: encoded bytes and files as they are, all else as PNG."""
    source = content_of(source)
    if isinstance(source, str) and source.startswith("data:"):
        return source
    with naming(source):
        content = _encoded(source)
        kind = mime_type(content)
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def mime_type(content: bytes) -> str | None:
    """The type of an encoded image, read from its header: ``image/png``. Raises ValueError if it has none of FORMATS."""
    return _identify(io.BytesIO(content)).get_format_mimetype()


def encode_png(image: Image.Image) -> bytes:
    """The image as a PNG file, its EXIF orientation kept; a mode that PNG lacks, such as CMYK, becomes RGB, with transparency RGBA."""
    with naming(image):
        _loaded(image)
        if image.mode not in PNG_MODES:
            _upright(image)  # refuses more than 8 bits a channel
    buffer = io.BytesIO()
    mode = "RGBA" if image.mode in ("PA", "RGBa") else "RGB"
    kept = image if image.mode in PNG_MODES else image.convert(mode)
    kept.save(buffer, format="PNG", compress_level=1, exif=image.getexif())
    return buffer.getvalue()


def _encoded(source: ImageSource) -> bytes:
    if isinstance(source, bytes):
        return source
    if isinstance(source, DecodedImage):
        return encode_png(source.image)
    if isinstance(source, str | Path) and not is_url(source):
        return read_image_file(source)
    return encode_png(load_image(source))


def image_size(source: ImageSource) -> tuple[int, int]:
    """Width and height of the image that :func:`load_image` returns; only its header is decoded. Raises as :func:`load_image`."""
    with naming(source):
        image = _open(_fetched(source))
        width, height = image.size
        exif = image.getexif() if ORIENTED & image.info.keys() else {}  # without this condition, a PNG would be decoded
        sideways = exif.get(ExifTags.Base.Orientation, 1) >= 5  # rotated by 90 or 270 degrees
        return (height, width) if sideways else (width, height)


def _upright(image: Image.Image) -> Image.Image:
    """Rotated as its EXIF orientation says. Raises ValueError for more than 8 bits a channel: PIL would clip, not scale."""
    if image.mode.startswith(("I", "F")):
        raise _UnfitError(
            f"mode {image.mode} holds more than 8 bits a channel; scale it to 0..255 first, for example with numpy."
        )
    if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
        return image  # without a copy
    return ImageOps.exif_transpose(image)


def source_key(source: ImageSource) -> str:
    """A key that is equal for equal sources, made without decoding encoded images."""
    source = content_of(source)
    with naming(source):
        return _key(source)


def _key(source: ImageSource) -> str:
    if isinstance(source, DecodedImage):
        return source.id
    if isinstance(source, Image.Image):
        return "pixels:" + content_hash(source)
    if isinstance(source, bytes):
        return "bytes:" + hashlib.blake2b(source, digest_size=16).hexdigest()
    if not isinstance(source, str | Path):
        raise _SourceError(source)
    text = str(source)
    if is_url(text) or text.startswith("data:"):
        return text if len(text) < 200 else "text:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path = Path(text.removeprefix("file://"))
    stamp = path.stat() if path.is_file() else None
    return f"file:{path.absolute()}:{stamp and (stamp.st_mtime_ns, stamp.st_size)}"


def content_hash(image: Image.Image) -> str:
    """A hash of mode, size, orientation, palette and pixels: equal for two encodings of one image."""
    return _content_hash(_loaded(image), image.tobytes())


def _content_hash(image: Image.Image, content: bytes) -> str:
    """:func:`content_hash` of an image whose pixels are the bytes ``content``."""
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    meaning = (image.mode, image.size, image.getpalette(None), image.info.get("transparency"), orientation)
    digest = hashlib.blake2b(repr(meaning).encode(), digest_size=16)
    digest.update(content)
    return digest.hexdigest()


def image_digest(image: Image.Image) -> str:
    """:func:`content_hash`; of an image that is refused or does not decode, a hash of its format, mode and size."""
    try:
        return content_hash(image)
    except Exception:
        return hashlib.blake2b(repr((image.format, image.mode, image.size)).encode(), digest_size=16).hexdigest()


def content_of(source: ImageSource) -> ImageSource:
    """The bytes or path inside the Hugging Face ``datasets`` form; the image of a :class:`MediaItem`; other sources as they are."""
    if isinstance(source, MediaItem):
        return source.image
    return (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source


def _fetched(source: ImageSource) -> ImageSource:
    source = content_of(source)
    return http_loop().wait(fetch(source)) if is_url(source) else source


def _open(source: ImageSource) -> Image.Image:
    """A PIL image, not decoded if it came encoded, whose format and size are allowed."""
    source = content_of(source)
    if isinstance(source, DecodedImage):
        return source.image
    if isinstance(source, str) and source.startswith("data:"):
        if "base64," not in source:
            raise _UnfitError("a data URI must hold base64.")
        source = base64.b64decode(source.partition("base64,")[2])
    if isinstance(source, bytes):
        source = _identify(io.BytesIO(source))
    elif isinstance(source, str | Path):
        source = _identify(_regular_file(source))
    if not isinstance(source, Image.Image):
        raise _SourceError(source)
    return _allowed(source)


def copy_on_write(source: ImageSource) -> ImageSource:
    """A PIL image as another one in the same memory, which is copied when it is drawn on; other sources as they are.

    The members of a group share their task's images, and an env may draw on them. One that does not decode stays as it is: whoever
    shows it raises the error.
    """
    if not isinstance(source, Image.Image):
        return source
    try:
        image = _loaded(source)._new(source.im)
    except Exception:
        return source
    image.readonly = 1
    return image


def read_image_file(source: str | Path) -> bytes:
    """The encoded bytes of an image's file, whose header is read first. Raises ValueError, also for more than MAX_FILE_BYTES."""
    path = _regular_file(source)
    _identify(path).close()
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise _UnfitError(f"its file has more than {MAX_FILE_BYTES} bytes.")
    return content


def _regular_file(source: str | Path) -> Path:
    """The path of a source. Raises ValueError for a pipe, a device or a file of /proc: reading one might never end."""
    path = Path(str(source).removeprefix("file://"))
    if path.exists() and not path.is_dir() and not (path.is_file() and path.stat().st_size):
        raise _UnfitError("it is not a regular file, or it is empty.")
    return path


def _identify(file: Path | io.BytesIO) -> ImageFile.ImageFile:
    _check_exif(file)
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _UnfitError(f"cannot identify image file: it has none of the formats {', '.join(FORMATS)}.") from error


def _check_exif(file: Path | io.BytesIO) -> None:
    """Refuse a JPEG with many segments of EXIF, before PIL opens it."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
        opened.seek(0)
        if opened.read(3) == b"\xff\xd8\xff":
            segments = sum(part.count(b"Exif\0\0") for part in iter(lambda: opened.read(2**20), b""))
            if segments > MAX_EXIF:
                raise _UnfitError(
                    f"it is a JPEG with {segments} segments of EXIF, more than {MAX_EXIF}: save it again first."
                )


def _allowed(image: Image.Image) -> Image.Image:
    """The image, if its format is one of FORMATS and its size within limits. Decodes nothing."""
    width, height = image.size
    formats = (*FORMATS, "MPO")  # MPO: JPEG with several images
    if isinstance(image, ImageFile.ImageFile) and image.format not in formats:
        raise _UnfitError(f"its format is {image.format}, none of {', '.join(FORMATS)}: convert it first.")
    if min(width, height) < 1:
        raise _UnfitError(f"it is {width}x{height} pixels, but it must have at least one.")
    if width * height > MAX_PIXELS:
        raise _UnfitError(f"it is {width}x{height} pixels, more than {MAX_PIXELS} in all: scale it down first.")
    if any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())):
        raise _UnfitError("it is a BMP with run lengths, which take Python minutes to read: convert it first.")
    return image


def _check_scans(image: Image.Image) -> None:
    """Refuse an image that is a JPEG of many scans and is not decoded yet."""
    file = getattr(image, "fp", None)
    if image.format not in ("JPEG", "MPO") or file is None or not getattr(image, "tile", ()):
        return
    file.seek(0)
    scans = sum(len(SCAN.findall(part)) for part in iter(lambda: file.read(2**20), b""))
    if scans > MAX_SCANS:
        raise _UnfitError(f"it is a JPEG of {scans} scans, more than {MAX_SCANS}: save it again first.")


def _loaded(image: Image.Image) -> Image.Image:
    """The image with its pixels decoded, in one thread at a time."""
    _allowed(image)
    with _DECODING[id(image) // 16 % len(_DECODING)]:
        _check_scans(image)
        image.load()
    return image


@contextmanager
def naming(source: ImageSource) -> Iterator[None]:
    """Within the context, errors become an :class:`ImageError` that names the source."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        message = f"an image does not load: {describe(source)}: {error}"
        if isinstance(error, RetryableError | MemoryError) or _may_pass(error):
            raise ImageUnavailableError(message) from error
        raise ImageError(message, _reason(error)) from error


def _may_pass(error: Exception) -> bool:
    """Whether the machine reported the error, such as too many open files; PIL's own errors have no number."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _ABSENT


def _reason(error: Exception) -> str | None:
    if isinstance(error, _SourceError):
        return None
    if isinstance(error, _UnfitError):
        return str(error)
    if isinstance(error, RefusedError):
        return "its address does not return it."
    if isinstance(error, OSError) and error.errno is not None:
        return "there is no such file."
    return "it does not decode."


def describe(source: ImageSource) -> str:
    """A short text for the source, for error messages: the name of its file, if it has one."""
    if isinstance(source, dict) and source.get("path"):
        return repr(source["path"])
    source = content_of(source)
    if isinstance(source, bytes):
        return f"{len(source)} bytes beginning with {source[:8]!r}"
    if isinstance(source, Image.Image):
        return f"<Image mode={source.mode} size={source.width}x{source.height}>"
    text = f"array {list(source.shape)}" if isinstance(source, np.ndarray) else repr(source)
    return text if len(text) < 120 else text[:117] + "..."


def blank(image: Image.Image) -> Image.Image:
    """A grey image of the same size: a control for whether a run learns from its images."""
    return Image.new("RGB", image.size, (128, 128, 128))
