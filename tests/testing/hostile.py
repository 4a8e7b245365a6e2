"""Hostile inputs: generators of text and JSON that a policy, a tool or a client may send, and a watch over what they reach.

The contract that the tests in tests/hostile/ hold: each input ends in an answer, a counted failure or one clear error, within a
limit of CPU time; nothing is read or fetched that the recipe did not name; no process is started.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import re
import string
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

CANARY = "/vlmrl-canary/secret.png"  # no input may make anybody open it
CANARY_HOST = "canary.vlmrl.invalid"  # or look this host up
CPU_SECONDS = 30.0  # what one input may cost; the usual is milliseconds, and a machine may be ten times slower

ADDED_TOKENS = (  # of Qwen's tokenizers, special ones first
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|fim_prefix|>",
)
HALVES = ("<|im_", "end|>", "<tool_", "call>")
CONTROL = (
    *ADDED_TOKENS,
    *HALVES,
    "<answer>",
    "</answer>",
    "<search>",
    "</search>",
    "<information>",
    "<image>",
    "<score>",
    "</score>",
)
PLACES = (
    CANARY,
    f"file://{CANARY}",
    f"http://{CANARY_HOST}/a.png",
    f"ftp://{CANARY_HOST}/a",
    "data:image/png;base64,AAAA",
)
MATHS = (
    "\\boxed{",
    "\\boxed{42}",
    "\\boxed{(a+b+c+d+e)^9}",
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{\\frac{1}{0}}",
    "\\boxed{10^{400}}",
    "\\boxed{\\sum_{i=1}^{10^9} i}",
    "\\boxed{50000000!}",
    "\\boxed{" + "(" * 400 + ")" * 400 + "}",
)
JSON_PIECES = (
    '{"name": "zoom", "arguments": {"bbox": [0, 0, 1, 1000]}}',
    '{"name": "zoom", "arguments": {"bbox": [1e999, 0, NaN, 5]}}',
    '{"name": "calc_score", "arguments": {"answer": "9**9**9"}}',
    '{"name": "search", "arguments": {"query": ""}}',
    '{"name": null}',
    '{"name": "close", "arguments": {}}',
    '{"name": "__init__", "arguments": {"task": 1}}',
    "[" * 3000,
    '{"a":' * 1500,
)
ODD = (
    "\0",
    "\u202e",
    "\ufeff",
    "\u2028",
    "é́́",
    "🧨",
    "\x1b[2J",
    "﷽" * 50,
    "\\",
    "{{",
    "}}",
    "{% raw %}",
    "%s%n",
    "'; --",
)


def text(rng: random.Random, pieces: int = 6) -> str:
    """A text of up to ``pieces`` pieces: control tokens, paths, URLs, mathematics, broken calls, long runs of one character."""
    return "".join(_piece(rng) for _ in range(rng.randint(0, pieces)))


def _piece(rng: random.Random) -> str:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice((" ", "\n", "(", "a", "{", "<", "\\boxed{", "1", "<tool_call>")) * rng.choice(
            (3, 300, 30_000)
        )
    if kind == 1:
        return f"<tool_call>\n{rng.choice(JSON_PIECES)}\n</tool_call>"
    if kind == 2:
        return f"<tool_call>{json.dumps({'name': rng.choice(NAMES), 'arguments': value(rng)})}</tool_call>"
    if kind == 3:
        return f"<answer>{rng.choice(MATHS + PLACES)}</answer>"
    if kind == 4:
        return "".join(rng.choices(string.printable, k=rng.randint(0, 40)))
    return rng.choice(rng.choice((CONTROL, PLACES, MATHS, JSON_PIECES, ODD)))


NAMES = ("zoom", "calc_score", "search", "close", "", "zoom ", "__class__", "step")


def value(rng: random.Random, depth: int = 3) -> Any:
    """A JSON value of up to ``depth`` levels, with numbers at the edges and keys that mean something to somebody."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice((0, -1, 2**63, 10**40, 10**400, -0.0, 1e308, float("nan"), float("inf"), True, None))
    if kind in (1, 2):
        return rng.choice(rng.choice((PLACES, ODD, CONTROL, MATHS)))
    if kind < 6:
        return rng.choice(("", "a" * rng.choice((1, 5000)), 1, 2.5, [], {}))
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    keys = (
        "role",
        "content",
        "type",
        "image",
        "image_url",
        "url",
        "text",
        "$ref",
        "bbox",
        "reward",
        "obs_str",
        "multi_modal_data",
        "seed",
    )
    return {rng.choice(keys): value(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def junk(rng: random.Random) -> Any:
    """A Python value that a row or an env may hold in any place."""
    return rng.choice(
        [
            None,
            True,
            7,
            -1.5,
            math.nan,
            math.inf,
            10**400,
            np.float32(0.5),
            np.array([1.0, 2.0]),
            b"",
            b"\x89PNG\r\n\x1a\n",
            "gone.png",
            "data:image/png;base64,AAAA",
            "file:///nowhere/at/all.png",
            [],
            {},
            [[]],
            [None],
            (1, 2),
            {"bytes": None, "path": None},
            {"type": "image"},
            {"type": "image", "image": b"?"},
            {"type": "text"},
            {"type": "video"},
            datetime.date(2020, 1, 1),
            object(),
            rng.choice(ODD),
        ]
    )


_reached: list[str] = []
_watching = [False]


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _watching[0]:
        return
    if event == "open" and isinstance(args[0], str | bytes) and "vlmrl-canary" in str(args[0]):
        _reached.append(f"opened {args[0]!r}")
    elif (
        event in ("socket.getaddrinfo", "socket.gethostbyname")
        or (event == "socket.connect" and isinstance(args[1], tuple))
        or event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
    ):
        _reached.append(f"{event} {args!r}")


sys.addaudithook(_note)


@contextmanager
def harmless(case: Any, allowed: tuple[str, ...] = ()) -> Iterator[None]:
    """Fails if what runs inside opens the canary, reaches for the network, starts a process, or takes too much CPU time.

    ``allowed`` are texts of events (such as ``127.0.0.1``) that the test itself needs. ``case`` is named in the failure.
    """
    _reached.clear()
    _watching[0] = True
    began = time.process_time()
    try:
        yield
    finally:
        _watching[0] = False
    whole = repr(case)
    reached = [
        event for event in _reached if not (any(text in event for text in allowed) or _of_earlier_test(event, whole))
    ]
    shown = whole[:2000]
    assert not reached, f"{shown} reached {reached}"
    seconds = time.process_time() - began
    assert seconds < CPU_SECONDS, f"{shown} took {seconds:.0f} s of CPU time"


def _of_earlier_test(event: str, case: str) -> bool:
    """Whether a client of an earlier test asks for its server, which has ended: a port that the case does not name."""
    port = re.search(r"\('127\.0\.0\.1', (\d{5})\)", event)
    return port is not None and port[1] not in case


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", sizes) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
