"""Files of some kilobytes, within the limit of pixels, whose decoding takes minutes of a thread or gigabytes of memory."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from vlmrl.multimodal.images import ImageError, image_size, load_image

SHORT, LONG, SLONG8 = 3, 4, 17
TEXT = 2


def tiff(
    width: int, length: int, entries: list[tuple[int, int, int, int]], rest: bytes = b"", raw: bool = False
) -> bytes:
    """A gray TIFF. ``entries`` are (tag, type, count, value or place); a place counts from the beginning of ``rest``."""
    sizes = {1: 1, TEXT: 1, SHORT: 2, LONG: 4, SLONG8: 8}
    usual = {256: width, 257: length, 258: 8, 259: 1 if raw else 8, 262: 1, 277: 1}
    every = sorted([*((tag, LONG, 1, value) for tag, value in usual.items()), *entries], key=lambda entry: entry[0])
    place = 8 + 2 + 12 * len(every) + 4
    packed = b""
    for tag, kind, count, value in every:
        packed += struct.pack("<HHII", tag, kind, count, value + place * (count * sizes[kind] > 4 or tag == -1))
    return struct.pack("<2sHIH", b"II", 42, 8, len(every)) + packed + bytes(4) + rest


def jpeg(side: int, scans: int, progressive: bool) -> bytes:
    """A JPEG of black pixels, whose scans after the first are empty or, in a progressive one, one run of blocks after the other."""

    def part(marker: int, content: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    frame = part(0xC2 if progressive else 0xC0, struct.pack(">BHHB", 8, side, side, 3) + components)
    tables = part(0xDB, bytes(1) + b"\1" * 64)
    for number, symbol in ((0x00, 0), (0x10, 0xE0 if progressive else 0)):
        tables += part(0xC4, bytes([number, 1, *[0] * 15, symbol]))
    first = part(0xDA, bytes([1, 1, 0, 0, 0 if progressive else 63, 0]))
    later = part(0xDA, bytes([1, 1, 0, 1, 63, 0])) if progressive else first
    return b"\xff\xd8" + tables + frame + first + later * (scans - 1) + b"\xff\xd9"


def encoded(kind: str, mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_tiff_whose_tiles_reach_far_out_of_it_is_refused():
    """Of 1600x1 pixels, in 100 tiles of 16x2097152, all in the same 33 KB: it took 8 s, and one of 1 MB half an hour."""
    tile = zlib.compress(bytes(16 * 2**21), 9)
    tables = struct.pack("<I", 2**31) * 100 + struct.pack("<I", len(tile)) * 100
    entries = [(322, LONG, 1, 16), (323, LONG, 1, 2**21), (324, LONG, 100, 0), (325, LONG, 100, 400)]
    with pytest.raises(ImageError, match="its tiles have more than 67108864 pixels in all"):
        image_size(tiff(1600, 1, entries, tables + tile))


@pytest.mark.parametrize("kind", [TEXT, 1])
def test_a_tiff_with_a_text_as_the_width_of_its_tiles_takes_no_memory(kind: int):
    """The text was repeated so many times as the tiles are long: 1.1 KB took 2 GB and held the interpreter for 8 s."""
    entries = [(322, kind, 1000, 0), (323, LONG, 1, 2 * 10**5), (324, LONG, 1, 8), (325, LONG, 1, 8)]
    with pytest.raises(ImageError, match=r"its size and that of its tiles must be whole numbers from 1 on"):
        image_size(tiff(8, 8, entries, b"a" * 1000))


def test_a_tiff_that_gives_the_size_of_its_tiles_twice_is_refused():
    """PIL ignores the first, of a type that it does not know, and libtiff the second: one tile of 32768x32768, in 190 bytes."""
    entries = [(322, SLONG8, 1, 0), (322, LONG, 1, 16), (323, SLONG8, 1, 0), (323, LONG, 1, 16)]
    content = tiff(16, 16, [*entries, (324, LONG, 1, 8), (325, LONG, 1, 20)], struct.pack("<Q", 2**15))
    with pytest.raises(
        ImageError, match="its size or that of its tiles is given twice, or in a type that TIFF has not"
    ):
        load_image(content)
    with pytest.raises(
        ImageError, match="its size or that of its tiles is given twice, or in a type that TIFF has not"
    ):
        load_image(tiff(16, 16, [(322, SLONG8, 1, 0), (323, SLONG8, 1, 0)], struct.pack("<Q", 2**15)))


def test_a_tiff_whose_strips_overlap_is_read_by_libtiff():
    """Strips of one row that begin a byte apart: Python read 4,096 of 4,096 pixels byte by byte for 24 s."""
    places = struct.pack("<200I", *range(200, 400))
    entries = [(278, LONG, 1, 1), (273, LONG, 200, 0), (279, LONG, 200, 0)]
    content = tiff(200, 200, entries, places + bytes(1000), raw=True)
    opened = Image.open(io.BytesIO(content))
    assert [tile[0] for tile in opened.tile] == ["libtiff"]
    assert load_image(opened).size == (200, 200)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_tiffs_without_compression_look_as_ever(mode: str):
    plain, packed = encoded("TIFF", mode), encoded("TIFF", mode, compression="tiff_lzw")
    assert b"\x03\x01\x03\x00\x01\x00\x00\x00\x01\x00" in plain  # compression: none
    assert load_image(plain).tobytes() == load_image(packed).tobytes()


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_many_scans_is_refused(progressive: bool):
    """Each is a pass over all pixels: 1,000 progressive ones of 8192x8192 in 70 KB took 22 s, and 1 MB takes minutes."""
    assert load_image(jpeg(64, 100, progressive)).size == (64, 64)
    for content in (jpeg(64, 101, progressive), jpeg(64, 101, progressive) + b"\0" * 2**21):
        with pytest.raises(ImageError, match="it is a JPEG of 101 scans, more than 100: save it again first"):
            load_image(content)


def test_usual_jpegs_are_decoded_as_before():
    for options in ({}, {"progressive": True}, {"progressive": True, "optimize": True}):
        content = encoded("JPEG", **options) + bytes.fromhex("ffda") * 1000  # such as the video of a motion photo
        assert load_image(content).size == load_image(Image.open(io.BytesIO(content))).size == (256, 256)


def test_a_ppm_of_text_is_refused():
    """Each comment in it copies the rest of a MiB: one of 1 MiB took 21 s."""
    with pytest.raises(ImageError, match="it is a PPM of text, which takes minutes to read: convert it first"):
        load_image(b"P3 1 1 255\n" + b"#\n" * 1000 + b"1 2 3 ")
    assert load_image(b"P6 1 1 255\n\1\2\3").getpixel((0, 0)) == (1, 2, 3)


def test_a_large_bmp_with_run_lengths_is_refused():
    """The end of a line fills the row pixel by pixel: 32 KB of them, for 8192x8192 pixels, took 22 s."""

    def bmp(side: int) -> bytes:
        header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 1, 1, 256, 0)
        place = struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024)
        return b"BM" + place + header + bytes(1024) + b"\1\1\0\0" * side + b"\0\1"

    assert load_image(bmp(64)).size == (64, 64)
    with pytest.raises(ImageError, match="it is a BMP with run lengths and more than 4194304 pixels: convert it first"):
        load_image(bmp(2049))
