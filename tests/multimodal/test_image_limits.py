"""Which images are decoded at all: formats, sizes, and what is refused before a pixel exists."""

from __future__ import annotations

import base64
import io
import os
import struct
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from testing.episodes import image, new_store
from testing.hostile import png_header

from vlmrl.multimodal import images
from vlmrl.multimodal.embedded import embed_image
from vlmrl.multimodal.images import (
    FORMATS,
    ImageError,
    ImageUnavailableError,
    data_uri,
    encode_png,
    image_digest,
    image_size,
    load_image,
    source_key,
)

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def encoded(kind: str, size: tuple[int, int] = (64, 32), **options: object) -> bytes:
    buffer = io.BytesIO()
    image(size=size).save(buffer, kind, **options)
    return buffer.getvalue()


LOADS: list[Callable[[Any], Any]] = [load_image, image_size, new_store().load, new_store().measure]


@pytest.mark.parametrize("load", [*LOADS, data_uri, embed_image])
def test_a_pipe_is_not_opened(load: Callable[[Any], Any], tmp_path: Path):
    """Opening it would hold the thread until somebody writes to it."""
    os.mkfifo(path := tmp_path / "a.png")
    for source in (path, str(path), f"file://{path}", "file:///dev/zero", "file:///proc/self/environ"):
        with pytest.raises(ImageError, match="it is not a regular file, or it is empty"):
            load(source)


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


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_of_many_scans_is_refused(progressive: bool):
    """Each is a pass over all pixels: 1,000 progressive ones of 8192x8192 in 70 KB took 22 s, and 1 MB takes minutes."""
    assert load_image(jpeg(64, 100, progressive)).size == (64, 64)
    for content in (jpeg(64, 101, progressive), jpeg(64, 101, progressive) + b"\0" * 2**21):
        with pytest.raises(ImageError, match="it is a JPEG of 101 scans, more than 100: save it again first"):
            load_image(content)


def test_a_jpeg_of_many_exif_segments_is_refused(tmp_path: Path):
    """PIL copies all of them for each: 4 MB of short ones took 11 s, and 64 MB take an hour, in which all threads are slower."""
    content = encoded("JPEG", (64, 64))
    segment = b"\xff\xe1\0\x16Exif\0\0MM\0*\0\0\0\x08" + bytes(6)
    assert load_image(content[:2] + segment * 100 + content[2:]).size == (64, 64)
    path = tmp_path / "many.jpg"
    path.write_bytes(content[:2] + segment * 101 + content[2:])
    for source in (path.read_bytes(), path):
        for read in (load_image, image_size, data_uri):
            with pytest.raises(
                ImageError, match="it is a JPEG with 101 segments of EXIF, more than 100: save it again first"
            ):
                read(source)


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
def test_overlapping_tags_of_exif_take_no_memory():
    """Before version 13 of PIL, a PNG of 320 KB with 10,000 tags for the same 200 KB took 1.9 GB. This has 1,000 for 100 KB."""
    tags = b"".join(struct.pack(">HHII", number + 1, 7, 100_000, 0) for number in range(1000))
    exif = b"MM\0*\0\0\0\x08" + struct.pack(">H", 1000) + tags + bytes(100_000)
    content = encoded("PNG", exif=exif)
    tracemalloc.start()
    try:
        load_image(content)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_usual_jpegs_are_decoded_as_before():
    for options in ({}, {"progressive": True}, {"progressive": True, "optimize": True}):
        # Such as the video of a motion photo.
        content = encoded("JPEG", (256, 256), **options) + bytes.fromhex("ffda") * 1000
        assert load_image(content).size == load_image(Image.open(io.BytesIO(content))).size == (256, 256)


def test_a_bmp_with_run_lengths_is_refused():
    """The end of a line fills the row pixel by pixel: 32 KB of them, for 8192x8192 pixels, took 22 s."""
    header = struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 8, 1, 0, 1, 1, 256, 0)
    content = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + header + bytes(1024) + b"\1\1\0\0" * 64 + b"\0\1"
    for source in (content, Image.open(io.BytesIO(content))):
        with pytest.raises(ImageError, match="it is a BMP with run lengths"):
            load_image(source)


@pytest.mark.parametrize("load", [data_uri, embed_image])
def test_a_file_over_the_limit_is_not_read_whole(load: Callable[[Any], Any], tmp_path: Path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(encoded("PNG") + b"\0" * 100)
    load(str(path))
    monkeypatch.setattr(images, "MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(ImageError, match="its file has more than"):
        load(str(path))


@pytest.mark.parametrize("load", LOADS)
def test_postscript_is_not_run(load: Callable[[Any], Any], tmp_path: Path):
    """PIL runs Ghostscript for it: a process, which `tests/conftest.py` refuses."""
    path = tmp_path / "a.png"
    path.write_bytes(EPS)
    uri = "data:image/png;base64," + base64.b64encode(EPS).decode()
    for source in (EPS, path, str(path), f"file://{path}", uri, {"bytes": EPS, "path": None}):
        with pytest.raises(ImageError, match=r"cannot identify image file: it has none of the formats PNG, JPEG"):
            load(source)


@pytest.mark.parametrize("use", [*LOADS, encode_png, source_key, data_uri])
def test_postscript_that_someone_opened_is_not_run(use: Callable[[Any], Any]):
    with pytest.raises(ImageError, match="its format is EPS, none of PNG"):
        use(Image.open(io.BytesIO(EPS)))


def test_a_digest_of_an_image_that_is_refused_is_one_of_its_size_alone():
    one, two = Image.open(io.BytesIO(EPS)), Image.open(io.BytesIO(EPS + b"\n"))
    assert image_digest(one) == image_digest(two) != image_digest(Image.new("RGB", (10, 10)))


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_the_usual_formats_are_decoded(kind: str):
    data = encoded(kind)
    for source in (data, Image.open(io.BytesIO(data))):
        loaded = load_image(source)
        assert (loaded.mode, loaded.size) == ("RGB", (64, 32))
        red, green, blue = loaded.getpixel((20, 20))
        assert red > 250 and green < 5 and blue < 5
        assert new_store().load(source).num_tokens == 2


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "TGA", "PCX", "SGI", "JPEG2000"])
def test_other_formats_are_refused_with_the_ones_that_are_not(kind: str):
    data = encoded(kind, (64, 64))
    with pytest.raises(ImageError, match=r"none of the formats PNG, JPEG, WEBP, GIF, BMP"):
        load_image(data)
    with pytest.raises(ImageError, match=rf"its format is {kind}, none of PNG"):
        load_image(Image.open(io.BytesIO(data)))
    assert load_image(Image.open(io.BytesIO(data)).convert("RGB")).size == (64, 64)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("load", LOADS)
def test_too_many_pixels_are_refused_before_one_is_decoded(load: Callable[[Any], Any]):
    bomb = png_header(12_000, 12_000)  # decoding it would say that its data is cut
    for source in (bomb, Image.open(io.BytesIO(bomb))):
        with pytest.raises(
            ImageError, match=r"it is 12000x12000 pixels, more than 67108864 in all: scale it down first"
        ):
            load(source)
    with pytest.raises(ImageError, match="exceeds limit"):  # PIL's own
        load(png_header(2**31 - 1, 2**31 - 1))


@pytest.mark.parametrize("load", LOADS)
def test_the_limit_is_the_number_of_pixels(load: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 64 * 32)
    assert load(image(size=(64, 32))) and load(encoded("PNG", (32, 64)))
    for source in (image(size=(64, 33)), encoded("JPEG", (33, 64))):
        with pytest.raises(ImageError, match=r"pixels, more than 2048 in all"):
            load(source)


def test_an_image_with_an_extreme_shape_is_loaded_and_only_the_processor_refuses_it():
    assert load_image(image(size=(1, 500))).size == (1, 500)
    for refuses in (new_store().load, new_store().measure):
        with pytest.raises(
            ImageError, match=r"size=1x500.*it is 1x500 pixels, .* aspect ratio must be smaller than 200"
        ):
            refuses(image(size=(1, 500)))


def test_a_loaded_image_is_a_copy():
    source = image()
    loaded = load_image(source)
    loaded.putpixel((0, 0), (0, 0, 255))
    assert source.getpixel((0, 0)) == (255, 0, 0)


def test_what_the_machine_failed_at_may_succeed_later(tmp_path: Path):
    class Broken(Image.Image):
        def load(self) -> Any:
            raise OSError(24, "Too many open files")

    broken = Broken()
    broken._size, broken._mode = (64, 32), "RGB"
    with pytest.raises(ImageUnavailableError, match="Too many open files") as failure:
        load_image(broken)
    assert failure.value.reason is None


def test_one_image_that_decodes_slowly_does_not_keep_others_from_decoding():
    entered, go = threading.Event(), threading.Event()

    class Slow(Image.Image):
        def load(self) -> Any:
            entered.set()
            assert go.wait(600)
            return super().load()

    slow = Slow()
    slow._size, slow._mode, slow.im = (64, 32), "RGB", image().im
    thread = threading.Thread(target=load_image, args=[slow], daemon=True)
    thread.start()
    assert entered.wait(600)
    others = [image(name) for name in ("red", "green", "blue")]
    found = [each for each in others if id(each) // 16 % 64 != id(slow) // 16 % 64]
    loaded: list[Image.Image] = []
    second = threading.Thread(target=lambda: loaded.extend(map(load_image, found)), daemon=True)
    second.start()
    second.join(600)
    assert found and len(loaded) == len(found) and thread.is_alive()
    go.set()
    thread.join(600)
