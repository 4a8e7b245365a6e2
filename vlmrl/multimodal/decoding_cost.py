"""Refuses encoded images that are small and within the limit of pixels, and take minutes or gigabytes to decode."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from PIL import Image, TiffImagePlugin
from PIL.ExifTags import Base

MAX_SCANS = 100
"""Of a JPEG, each of which is a pass over all its pixels and takes ten bytes. Progressive ones have about ten."""
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
"""The beginning of a scan of one to four components."""
READ_BYTES = 2**20
MAX_RUN_PIXELS = 2**22
"""Of a BMP with run lengths, which Python decodes pixel by pixel."""
TILE_TAGS = (Base.ImageWidth, Base.TileWidth, Base.ImageLength, Base.TileLength)

TiffImagePlugin.READ_LIBTIFF = True  # Python's own reader takes hours where the strips of a small file overlap


def check_header(image: Image.Image, most_pixels: int) -> None:
    """Raises ValueError for what the header of an image says. Reads nothing of its file."""
    if any(tile[0] == "ppm_plain" for tile in getattr(image, "tile", ())):
        raise ValueError("it is a PPM of text, which takes minutes to read: convert it first.")
    if any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())) and image.width * image.height > MAX_RUN_PIXELS:
        raise ValueError(f"it is a BMP with run lengths and more than {MAX_RUN_PIXELS} pixels: convert it first.")
    if _tiled_pixels(getattr(image, "tag_v2", {})) > most_pixels:
        raise ValueError(f"its tiles have more than {most_pixels} pixels in all.")


def check_file(image: Image.Image) -> None:
    """Raises ValueError for what the file of an image says that is not decoded yet. The caller has the image's lock."""
    file = getattr(image, "fp", None)
    if file is None or not getattr(image, "tile", ()):
        return
    if image.format in ("JPEG", "MPO"):
        file.seek(0)
        scans = sum(len(SCAN.findall(part)) for part in iter(lambda: file.read(READ_BYTES), b""))
        if scans > MAX_SCANS:
            raise ValueError(f"it is a JPEG of {scans} scans, more than {MAX_SCANS}: save it again first.")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        seen = [tag for tag in TILE_TAGS if tag in image.tag_v2]
        if sorted(seen) != sorted(_tile_tags(file, image.tag_v2.offset)):
            raise ValueError("its size or that of its tiles is given twice, or in a type that TIFF has not.")


def _tiled_pixels(tags: Any) -> int:
    """The pixels of all tiles of a TIFF, 0 without tiles. Each is decoded whole, however much of it lies outside of the image."""
    if Base.TileWidth not in tags and Base.TileLength not in tags:
        return 0
    width, tile_width, length, tile_length = sizes = [tags.get(tag) for tag in TILE_TAGS]
    if not all(isinstance(size, int) and size > 0 for size in sizes):  # a text times a number takes all memory
        raise ValueError("its size and that of its tiles must be whole numbers from 1 on.")
    return math.ceil(width / tile_width) * tile_width * math.ceil(length / tile_length) * tile_length


def _tile_tags(file: Any, offset: int) -> list[int]:
    """Those of TILE_TAGS in a TIFF's directory as libtiff reads it, which knows types that PIL ignores."""
    file.seek(0)
    header = file.read(4)
    order, is_big = ("<" if header[:2] == b"II" else ">"), 43 in header
    file.seek(offset)
    (count,) = struct.unpack(f"{order}{'Q' if is_big else 'H'}", file.read(8 if is_big else 2))
    size = 20 if is_big else 12
    entries = file.read(min(count, 2**16) * size)
    tags = [struct.unpack_from(f"{order}H", entries, start)[0] for start in range(0, len(entries) - 1, size)]
    return [tag for tag in tags if tag in TILE_TAGS]
