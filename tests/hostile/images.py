"""Images as envs, tools and datasets may pass them: whole ones, cut and changed files, headers that lie, sizes, what is no image."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from testing.episodes import a_task, decoded, renderer, turn_loop

from vlmrl import Env, obs
from vlmrl.samples import audit, concat

MODES = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
    "I",
    "I;16",
    "F",
    "RGBa",
    "La",
)
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "EPS", "PDF")
SIZES = (0, 1, 1, 2, 3, 5, 27, 28, 32, 33, 64, 199, 200, 201, 256, 401, 700)
CLAIMED = (0, 1, 64, 8192, 8193, 12_000, 65_535, 2**31 - 1, 2**32 - 1)
TEXTS = (
    "",
    "x" * 5000,
    "\x00",
    "/",
    "/dev/null",
    "/no/such.png",
    "file://",
    "file:///dev/zero",
    "data:,",
    "data:image/png;base64,",
)
OTHERS = (None, 5, 1.5, True, [], {}, {"bytes": None, "path": None}, {"path": 5}, object(), Exception)


def cases(rng: random.Random) -> Iterator[Any]:
    """Endlessly: image sources, right and wrong ones."""
    makers: list[Callable[[random.Random], Any]] = [_pixels, _file, _changed, _changed, _header, _text, _other]
    while True:
        source = rng.choice(makers)(rng)
        if isinstance(source, bytes):
            source = rng.choice([bytes, bytes, _uri, _opened, _row])(source)
        yield source


def outcome(source: Any) -> str:
    """``shown`` if a model sees the image after its first response, ``told`` if it reads why not, ``env error`` if the episode fails.

    Anything else raises: an exception that leaves the turn loop, an episode that does not end, tokens that the audit refuses.
    """

    class Shows(Env):
        def step(self, response_text: str) -> Any:
            return obs("Closer:", images=[source]), self.turn == 1, {"reward": 0.5}

    loop = turn_loop(Shows, ["zoom", "done"], max_tokens=4000, env_timeout=60.0)

    async def play() -> Any:
        async with asyncio.timeout(120):
            return await loop.play(a_task(), "g", "g/00")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's
        trajectory = asyncio.run(play())
    if trajectory.failed:
        assert trajectory.ending == "error" and not trajectory.non_retryable, trajectory.error
        assert "an image does not load: " in trajectory.error
        return "env error"
    audit(concat(trajectory), [trajectory], image_token_id=renderer().image_token_id, banned_ids=[])
    told = "[This image cannot be shown: " in decoded(trajectory.turns[1].prompt_ids)
    assert told == (not trajectory.turns[1].media) == bool(trajectory.turns[0].metrics)
    return "told" if told else "shown"


def _pixels(rng: random.Random) -> Image.Image:
    return Image.new(rng.choice(MODES), (rng.choice(SIZES), rng.choice(SIZES)))


def _file(rng: random.Random, kinds: tuple[str, ...] = KINDS) -> bytes:
    """An encoded image, of 16 to 700 pixels a side."""
    image = Image.effect_noise((rng.randint(16, 700), rng.randint(16, 64)), rng.random() * 99)
    buffer = io.BytesIO()
    image.convert(rng.choice(["RGB", "L"])).save(buffer, rng.choice(kinds))
    return buffer.getvalue()


def _changed(rng: random.Random) -> bytes:
    """An encoded image that is cut, or some of whose bytes are others, most of them in its header."""
    data = bytearray(_file(rng))
    if rng.random() < 0.3:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(min(len(data), 64)) if rng.random() < 0.6 else rng.randrange(len(data))
        data[place] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
    return bytes(data)


def _header(rng: random.Random) -> bytes:
    """A PNG, GIF or BMP that claims a size; its pixels are few or none."""
    width, height = rng.choice(CLAIMED), rng.choice(CLAIMED)
    kind = rng.choice(["png", "gif", "bmp"])
    if kind == "gif":
        size = struct.pack("<HH", width % 65536, height % 65536)
        return b"GIF89a" + size + b"\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0" + size + b"\0\x02\x02D\x01\0;"
    if kind == "bmp":
        sizes = struct.pack("<IiiHHIIiiII", 40, width % 2**31, height % 2**31, 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 70, 0, 0, 54) + sizes + b"\0" * 16
    depth, color = rng.choice([(1, 0), (8, 0), (8, 2), (8, 6), (16, 0), (16, 2)])
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, rng.choice([0, 1])))]
    chunks += [(b"IDAT", zlib.compress(b"\0" * rng.choice([0, 1, 1000]))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def _text(rng: random.Random) -> Any:
    text = rng.choice(TEXTS)
    if rng.random() < 0.3:
        text += "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randint(1, 40)))
    return rng.choice([str, str, Path, str.encode])(text)  # type: ignore[operator]


def _other(rng: random.Random) -> Any:
    return rng.choice(OTHERS)


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _row(data: bytes) -> dict[str, Any]:
    return {"bytes": data, "path": None}


def _opened(data: bytes) -> Any:
    """As an env may open it: PIL tries all of its formats, and decodes nothing yet."""
    try:
        return Image.open(io.BytesIO(data))
    except Exception:
        return data
