"""Images: loaded from anywhere, processed once, exactly as the model's own processor would."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import random
import threading
import weakref
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from testing.episodes import wait_until
from testing.fakes import item_of, make_item, qwen_vl
from transformers import AutoImageProcessor

from vlmrl.families.base import Family
from vlmrl.multimodal.images import (
    ImageError,
    blank,
    content_hash,
    data_uri,
    encode_png,
    image_size,
    load_image,
    source_key,
)
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.multimodal.store import MediaStore
from vlmrl.types import MediaItem
from vlmrl.utils.work_pool import WorkPool


def noise(size: tuple[int, int], mode: str = "RGB", seed: int = 0) -> Image.Image:
    count = size[0] * size[1] * len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, size, random.Random(seed).randbytes(count))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def as_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
def processor(qwen3_vl):
    return AutoImageProcessor.from_pretrained(qwen3_vl)


@pytest.fixture
def store(processor):
    return MediaStore(qwen_vl(), processor)


@pytest.fixture
def sources(tmp_path) -> list:
    """One image in every form."""
    image = noise((90, 70))
    data = encoded(image)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    twin = tmp_path / "b.bmp"
    twin.write_bytes(encoded(image, "BMP"))
    hf = [{"bytes": data, "path": None}, {"bytes": None, "path": str(path)}]
    return [path, str(path), f"file://{path}", twin, data, image, image.copy(), as_uri(data), *hf]


def inputs_of(items: list[MediaItem], processor, family: Family | None = None) -> dict[str, torch.Tensor]:
    return merge_mm_inputs(items, family or qwen_vl(), processor, torch.device("cpu"))


def assert_exact(item: MediaItem, image: Image.Image, processor) -> None:
    """The item holds what the processor makes of the original, and its image is never resized again."""
    wanted, made = processor(images=[image], return_tensors="pt"), inputs_of([item], processor)
    assert made.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(made[key], value), (key, image.mode, image.size)
    _, height, width = wanted["image_grid_thw"][0].tolist()
    assert item.size == item.image.size == (width * processor.patch_size, height * processor.patch_size)
    assert item.num_tokens == height * width // 4
    again = processor(images=[item.image], return_tensors="pt")
    assert torch.equal(again["pixel_values"], wanted["pixel_values"])


# One image, one item


def test_one_image_in_every_form_is_one_item_processed_once(store, sources):
    items = [store.load(source) for source in sources]
    assert len(set(map(id, items))) == 1
    assert (store.seen, store.processed) == (len(sources), 1)


def test_eight_gets_at_once_process_once(processor, sources):
    async def gather(store, wanted):
        return await asyncio.gather(*map(store.get, wanted))

    for wanted in ([sources[0]] * 8, [sources[5]] * 8, sources[:8]):
        store = MediaStore(qwen_vl(), processor, pool=WorkPool("media", 8))
        items = asyncio.run(gather(store, wanted))
        assert len(set(map(id, items))) == 1
        assert (store.seen, store.processed) == (8, 1)


def test_a_lazily_opened_image_is_read_once_by_many_threads(processor):
    data = encoded(noise((700, 700)))

    async def gather(image):
        return await asyncio.gather(*(store.get(image) for _ in range(8)))

    for _ in range(3):
        store = MediaStore(qwen_vl(), processor, pool=WorkPool("media", 8))
        items = asyncio.run(gather(Image.open(io.BytesIO(data))))
        assert len(set(map(id, items))) == 1


def test_different_images_are_different_items(store):
    red, other = Image.new("RGB", (64, 32), "red"), Image.new("RGB", (32, 64), "red")
    almost = red.copy()
    almost.putpixel((63, 31), (255, 0, 1))
    assert len({store.load(image).id for image in (red, other, almost)}) == 3
    assert store.processed == 3


def test_a_file_that_changed_is_loaded_again(store, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (32, 32), "red")))
    first = store.load(path)
    path.write_bytes(encoded(Image.new("RGB", (64, 32), "blue")))
    assert store.load(path).image.size == (64, 32)
    assert first.image.size == (32, 32)


def test_items_die_when_nobody_holds_them(store):
    image = noise((40, 40))
    item = asyncio.run(store.get(image))
    dead = weakref.ref(item)
    del item
    wait_until(lambda: gc.collect() >= 0 and dead() is None)  # the thread that made it lets go of it a moment later
    assert store._ids == {}
    store.load(image)
    assert (store.seen, store.processed) == (2, 2)


def test_an_image_turned_by_its_camera_is_another_than_the_same_pixels_upright(store):
    image = noise((64, 32))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by 90 degrees
    turned = Image.open(io.BytesIO(encoded(image, exif=exif)))
    assert content_hash(turned) != content_hash(image)
    assert store.load(image).image.size == (64, 32)
    assert store.load(turned).image.size == (32, 64)


def test_content_hash_knows_pixels_size_and_mode_only():
    image = noise((12, 8))
    assert content_hash(Image.open(io.BytesIO(encoded(image)))) == content_hash(image)
    assert content_hash(image) != content_hash(image.convert("L").convert("RGB"))
    grey = Image.new("L", (4, 2))
    assert len({content_hash(grey), content_hash(Image.new("L", (2, 4))), content_hash(grey.convert("P"))}) == 3


def test_source_key_is_short_for_a_long_data_uri():
    uri = as_uri(encoded(noise((50, 50))))
    assert len(source_key(uri)) < 50
    assert source_key(uri) == source_key(uri[:])
    assert source_key(uri) != source_key(uri[:-8] + "AAAAAAAA")


# Exactly the processor's pixels


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_pixels_equal_the_processors_in_every_mode(mode, store, processor):
    """What is transparent is on white, as the processors of newer versions of transformers have it, whatever the version."""
    rgba = noise((80, 50), "RGBA")
    image = (rgba if mode in ("RGBA", "LA", "L") else rgba.convert("RGB")).convert(mode)
    white = Image.new("RGBA", image.size, "white")
    opaque = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB") if mode in ("RGBA", "LA") else image
    assert_exact(store.load(image), opaque, processor)
    if mode != "CMYK":
        assert store.load(encoded(image)) is store.load(image)


def test_transparency_becomes_white(store, tmp_path):
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    path = tmp_path / "palette.png"
    path.write_bytes(encoded(palette, transparency=1))
    white = store.load(Image.new("RGB", (32, 32), "white"))
    uri = as_uri(path.read_bytes())
    sources = [clear, encoded(clear), clear.convert("LA"), path, path.read_bytes(), Image.open(path), uri]
    assert [store.load(source) is white for source in sources] == [True] * len(sources)
    assert store.load(palette).image.getpixel((0, 0)) == (255, 0, 0)


def test_images_that_differ_in_their_palette_only_are_different(store):
    red, blue = Image.new("P", (32, 32), 1), Image.new("P", (32, 32), 1)
    red.putpalette([0, 0, 0, 255, 0, 0])
    blue.putpalette([0, 0, 0, 0, 0, 255])
    items = [store.load(image) for image in (red, blue)]
    assert [item.image.getpixel((0, 0)) for item in items] == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl"])
def test_real_diagrams_equal_the_real_processors(name, shared):
    processor = AutoImageProcessor.from_pretrained(shared / "data/qwen" / name)
    store = MediaStore(qwen_vl(), processor)
    folder = shared / "data/geometry3k"
    rows = [json.loads(line) for line in (folder / "geometry3k.jsonl").read_text().splitlines()]
    paths = [folder / rows[index]["image"] for index in range(0, len(rows), len(rows) // 30)][:30]
    assert len(paths) == 30
    for path in paths:
        assert_exact(store.load(path), Image.open(path), processor)


def test_max_pixels_lowers_the_processors_limit_and_never_raises_it(processor):
    image = noise((640, 480))
    full = MediaStore(qwen_vl(), processor, max_pixels=10**9).load(image)
    assert full.image.size == (288, 192)
    small = MediaStore(qwen_vl(), processor, max_pixels=100 * 100).load(image)
    assert (small.image.size, small.num_tokens) == ((96, 64), 6)
    processor.size = {"shortest_edge": 32 * 32, "longest_edge": 100 * 100}
    assert_exact(small, image, processor)


def test_max_pixels_below_the_processors_minimum_is_kept(processor):
    processor.size = {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}
    item = MediaStore(qwen_vl(), processor, max_pixels=32 * 32).load(noise((640, 480)))
    assert (item.size, item.num_tokens, item.sizes["image_grid_thw"].tolist()) == ((32, 32), 1, [[1, 2, 2]])


@pytest.mark.parametrize("size", [(64, 32), (33, 200), (700, 30), (1000, 999), (5, 5)])
def test_an_image_is_measured_as_it_would_be_loaded(size, store, tmp_path):
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    (tmp_path / "a.png").write_bytes(encoded(noise(size)))
    forms = [noise(size), encoded(noise(size)), {"bytes": encoded(noise(size)), "path": None}, str(tmp_path / "a.png")]
    forms += [as_uri(encoded(noise(size))), encoded(noise(size), "JPEG", exif=turned)]
    for source in forms:
        measured, item = store.measure(source), store.load(source)
        assert (measured.shown, measured.num_tokens) == (item.image.size, item.num_tokens)
    assert measured.given == size[::-1]  # the last one was turned by its camera


def test_measuring_decodes_nothing_and_keeps_nothing(store):
    header = encoded(noise((640, 480)))[:100]  # enough to tell the size
    assert store.measure(header).given == (640, 480)
    assert (store.seen, store.processed) == (0, 0)
    with pytest.raises(ValueError, match=r"an image does not load: .*cannot identify"):
        store.measure(b"no image")


def test_transform_comes_before_hash_and_size(processor):
    store = MediaStore(qwen_vl(), processor, transform=blank)
    red, noisy = store.load(Image.new("RGB", (64, 32), "red")), store.load(noise((64, 32)))
    assert red is noisy
    assert store.processed == 1
    assert red.image.getcolors() == [(64 * 32, (128, 128, 128))]
    assert store.load(noise((32, 64))).sizes["image_grid_thw"].tolist() == [[1, 4, 2]]


def test_data_uri_holds_the_same_pixels(store):
    item = store.load(noise((90, 70)))
    uri = data_uri(item.image)
    head, _, body = uri.partition(",")
    assert head == "data:image/png;base64"
    back = Image.open(io.BytesIO(base64.b64decode(body)))
    assert (back.mode, back.size, back.tobytes()) == ("RGB", item.image.size, item.image.tobytes())
    assert np.array_equal(store.load(uri).pixels.read(), item.pixels.read())


@pytest.mark.slow
def test_an_image_is_loaded_from_a_url_with_redirects(store):
    data = encoded(noise((64, 32)))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response({"/image": 200, "/moved": 302}.get(self.path, 404))
            self.send_header("Location", "/image")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert store.load(f"{url}/image") is store.load(f"{url}/moved") is store.load(data)
        with pytest.raises(ValueError, match=r"an image does not load: .*/none': 404"):
            store.load(f"{url}/none")
    finally:
        server.shutdown()
        server.server_close()


def test_a_png_keeps_the_mode_and_the_orientation_and_cmyk_becomes_rgb():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = Image.open(io.BytesIO(encoded(noise((64, 32)), exif=exif)))
    assert load_image(encode_png(turned)).size == (32, 64)
    modes = [Image.open(io.BytesIO(encode_png(noise((8, 8), mode)))).mode for mode in ("L", "RGBA", "CMYK")]
    assert modes == ["L", "RGBA", "RGB"]
    for mode in ("I", "F"):  # converting them to RGB would clip
        with pytest.raises(ValueError, match="holds more than 8 bits a channel"):
            encode_png(Image.new(mode, (8, 8), 1000))


def test_an_orientation_in_xmp_is_measured_as_it_is_shown():
    xmp = b'<rdf:Description tiff:Orientation="6" xmlns:tiff="http://ns.adobe.com/tiff/1.0/"/>'
    file = io.BytesIO()
    noise((64, 32)).save(file, "JPEG", xmp=xmp)
    assert image_size(file.getvalue()) == load_image(file.getvalue()).size == (32, 64)


# What is no image


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("/no/such/image.png", "'/no/such/image.png': .*No such file"),
        (Path("/no/such/image.png"), r"PosixPath\('/no/such/image.png'\): .*No such file"),
        ("x" * 5000, r"'x+\.\.\.: .*File name too long"),
        (b"garbage", "7 bytes beginning with b'garbage': cannot identify"),
        (encoded(Image.new("RGB", (64, 64)))[:60], r"60 bytes beginning with b'.x89PNG"),
        ("data:image/png;base64,AAAA", "'data:image/png;base64,AAAA': cannot identify"),
        ("", "'': "),
        (None, "None: "),
        ({"bytes": None, "path": None}, "None: "),
        (5, "5: "),
    ],
    ids=["path", "Path", "long", "bytes", "cut", "uri", "empty", "None", "hf", "number"],
)
def test_what_is_no_image_is_named(source, named, store):
    for load in (load_image, store.load, lambda source: asyncio.run(store.get(source))):
        with pytest.raises(ValueError, match=f"^an image does not load: .*{named}"):
            load(source)
    assert store.processed == 0


def test_a_broken_image_that_was_opened_lazily_is_named(store):
    broken = Image.open(io.BytesIO(encoded(noise((64, 64)))[:5000]))
    with pytest.raises(ValueError, match=r"an image does not load: .*size=64x64"):
        store.load(broken)


def test_a_failure_reaches_all_who_wait_and_is_not_remembered(processor, tmp_path):
    store = MediaStore(qwen_vl(), processor, pool=WorkPool("media", 8))
    path = tmp_path / "late.png"

    async def gather():
        return await asyncio.gather(*(store.get(path) for _ in range(8)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(gather())] == [ImageError] * 8
    path.write_bytes(encoded(Image.new("RGB", (32, 32))))
    assert store.load(path).num_tokens == 1


# Merging


def test_merge_joins_each_key_once(processor):
    black, white = make_item("a", 2), item_of("b", Image.new("RGB", (96, 32), "white"), 3)
    merged = inputs_of([black, white, black], processor)
    assert merged["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 6], [1, 2, 4]]
    assert merged["pixel_values"].shape == (8 + 12 + 8, 3 * 2 * 16 * 16)
    assert merged["pixel_values"][:, 0].tolist() == [-1.0] * 8 + [1.0] * 12 + [-1.0] * 8
    assert inputs_of([], processor) == {}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_merge_refuses_images_of_two_processors(processor, order):
    items = [make_item("a", 1), replace(make_item("b", 1), sizes={})]
    with pytest.raises(
        ValueError, match=r"image [ab] has the sizes .* but image [ab] has .* must come from one processor"
    ):
        inputs_of([items[index] for index in order], processor)


def test_merge_refuses_what_is_no_tensor(processor, monkeypatch):
    family = qwen_vl()
    monkeypatch.setattr(family, "image_inputs", lambda processor, images: {"pixel_values": [[0.0]]})
    with pytest.raises(ValueError, match=r"image_inputs must be tensors, but 'pixel_values' is a list"):
        inputs_of([make_item("a", 1)], processor, family)
