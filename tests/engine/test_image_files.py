"""Files of images for servers: whole or not at all, the image itself where no file can be written, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from testing.fakes import item_of

from vlmrl.engine import image_files
from vlmrl.engine.image_files import EncodedImage, ImageFiles
from vlmrl.multimodal.pixels import NoPixels
from vlmrl.types import MediaItem

FULL = "an image file cannot be written"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in place of /dev/shm."""
    monkeypatch.setattr(image_files, "MEMORY", tmp_path)
    return tmp_path


def noise() -> MediaItem:
    return noise_of(0)


def noise_of(seed: int) -> MediaItem:
    """An image of 480 x 480 pixels, whose PNG is no smaller."""
    pixels = np.random.default_rng(seed).integers(0, 256, (480, 480, 3), dtype=np.uint8)
    return item_of(f"noise {seed}", Image.fromarray(pixels), 1)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more than ``size`` bytes into a file fails in the midst of it, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def encode(files: ImageFiles, item: MediaItem) -> EncodedImage:
    return asyncio.run(files.encode(item))


def content(image: EncodedImage) -> bytes:
    """The bytes of the file or of the data URI, which have the image's hash."""
    text = json.loads(image.json)
    head, _, data = text.partition("base64,")
    assert not data or head == "data:image/png;"
    found = base64.b64decode(data) if data else Path(text).read_bytes()
    assert hashlib.sha256(found).hexdigest() == image.sha256
    return found


def pixels(image: EncodedImage) -> bytes:
    return Image.open(io.BytesIO(content(image))).convert("RGB").tobytes()


def images_in(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("*/*.ppm*"))


def test_a_file_lives_as_long_as_its_image_and_the_folder_as_long_as_its_owner(memory: Path):
    files, item = ImageFiles(True), noise()
    image = encode(files, item)
    assert encode(files, item) is image and json.loads(image.json).startswith(str(memory))
    assert pixels(image) == item.image.tobytes() and files.sha256(item) == image.sha256
    assert files.encoded == 1 and images_in(memory) == ["0.ppm"] and files.bytes == image.size > 480 * 480 * 3
    del item, image
    gc.collect()
    assert images_in(memory) == [] and files.bytes == 0
    files.close()
    assert list(memory.iterdir()) == []


def test_the_same_pixels_have_the_same_hash(memory: Path):
    for files in (ImageFiles(True), ImageFiles(False)):
        assert (
            encode(files, noise_of(1)).sha256 == encode(files, noise_of(1)).sha256 != encode(files, noise_of(2)).sha256
        )
        files.close()


@pytest.mark.parametrize("by_path", [True, False])
def test_beyond_the_budget_the_least_recently_used_images_are_released_and_encoded_again(memory: Path, by_path: bool):
    items = [noise_of(seed) for seed in range(3)]
    measured = ImageFiles(by_path)
    size = encode(measured, items[0]).size
    measured.close()
    files = ImageFiles(by_path, budget=int(2.5 * size))
    first, _, _, again = (encode(files, items[index]) for index in (0, 1, 0, 2))  # the second one goes
    assert files.encoded == 3 and files.bytes <= 2.5 * size and pixels(again) == items[2].image.tobytes()
    assert encode(files, items[0]) is first and files.encoded == 3
    assert pixels(encode(files, items[1])) == items[1].image.tobytes() and files.encoded == 4
    assert len(images_in(memory)) == 3 * by_path  # one that is still referred to keeps its file
    del again
    assert len(images_in(memory)) == 2 * by_path
    files.close()


def test_an_image_is_sent_inline_while_there_is_no_space(memory: Path):
    files, item = ImageFiles(True), noise()
    with files_of_at_most(100_000), pytest.warns(RuntimeWarning, match=FULL):
        image = encode(files, item)
    assert images_in(memory) == []  # neither the file nor a part of it
    assert image.json.startswith(b'"data:image/png;base64,') and pixels(image) == item.image.tobytes()
    assert encode(files, item) is image
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert encode(files, noise_of(2)).json.startswith(b'"/')
    files.close()


def test_requests_at_the_same_time_encode_an_image_once(memory: Path):
    files, item = ImageFiles(True), noise()

    async def all_at_once():
        return await asyncio.gather(*(files.encode(item) for _ in range(8)))

    assert len(set(asyncio.run(all_at_once()))) == 1
    assert files.encoded == 1 and len(images_in(memory)) == 1
    files.close()


def test_images_are_sent_inline_if_there_can_be_no_folder(memory: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_files, "OwnedFolder", full)
    with pytest.warns(RuntimeWarning, match=FULL):
        files = ImageFiles(True)
    item = noise()
    assert pixels(encode(files, item)) == item.image.tobytes()
    assert encode(files, item) is encode(files, item) and files.encoded == 1
    files.close()


def test_an_error_is_not_kept(memory: Path):
    files, item = ImageFiles(False), noise()
    good = item.pixels
    object.__setattr__(item, "pixels", NoPixels())
    with pytest.raises(RuntimeError, match="did not get the image's pixels"):
        encode(files, item)
    object.__setattr__(item, "pixels", good)
    assert pixels(encode(files, item)) == item.image.tobytes()
    files.close()


OWNER = """
import asyncio, sys
from pathlib import Path
import numpy
from vlmrl.engine import image_files
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.types import MediaItem
image_files.MEMORY = Path(sys.argv[1])
pixels = ArrayPixels(numpy.zeros((32, 32, 3), numpy.uint8))  # without torch, whose import takes seconds
files, item = image_files.ImageFiles(True), MediaItem("red", (32, 32), {}, 1, {}, pixels)
print(asyncio.run(files.encode(item)).json.decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_folder_of_a_killed_process_is_deleted_at_the_next_start_and_no_living_one_s(memory: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OWNER, str(memory)]
    dead, living = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    )
    left, kept = (Path(json.loads(process.stdout.readline())) for process in (dead, living))  # type: ignore[union-attr]
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    stranger = memory / "vlmrl-images-without-a-lock"
    stranger.mkdir()
    assert left.exists() and kept.exists()
    files = ImageFiles(True)
    assert not left.parent.exists() and kept.exists() and stranger.exists()
    own = json.loads((kept_image := encode(files, item := noise())).json)
    ImageFiles(True).close()
    assert Path(own).exists() and kept.exists() and item.num_tokens == 1 and kept_image
    living.communicate("")
    assert not kept.parent.exists()
    files.close()
