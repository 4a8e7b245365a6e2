"""Picture sources: loading them, and telling them apart. The media store and envs use it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from PIL import Image

from vlmrl.types import ImageSource

ANY_SIZE = {"min_pixels": 1, "max_pixels": 2**62}


def load_image(source: ImageSource) -> Image.Image:
    """Any :data:`ImageSource` as an RGB picture of its own size; transparency becomes white."""
    from qwen_vl_utils import fetch_image

    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    try:
        if isinstance(source, bytes):
            source = Image.open(io.BytesIO(source))
        elif isinstance(source, Path):
            source = str(source)
        # Half a patch times its merge size is a factor of one: the size is left alone, since the processor's rule decides it.
        return fetch_image({"image": source, **ANY_SIZE}, image_patch_size=0.5)  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(f"a picture does not load: {describe(source)}: {error}") from error


def source_key(source: ImageSource) -> str:
    """A key that is equal for equal sources and costs no decoding."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
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
    """A hash of mode, size and pixels: the same for two encodings of one picture."""
    digest = hashlib.blake2b(f"{image.mode}{image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def describe(source: ImageSource) -> str:
    """The source in a few words, for an error."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes beginning with {source[:8]!r}"
    text = repr(source)
    return text if len(text) < 120 else text[:117] + "..."


def blank(image: Image.Image) -> Image.Image:
    """A grey picture of the same size: a control that shows what can be done without seeing."""
    return Image.new("RGB", image.size, (128, 128, 128))
