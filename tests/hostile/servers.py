"""What a broken or hostile inference server may answer to `/generate`: right responses in which up to three places are spoiled."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

END = 258  # the stop id of a right response


def cases(rng: random.Random) -> Iterator[tuple[int, bytes]]:
    """Endlessly: the HTTP status and the body of a response to a prompt of 3 ids, whose response may have up to 8."""
    while True:
        response = _right(rng)
        for _ in range(rng.randrange(4)):
            _spoil(response, rng)
        body = json.dumps(response).encode()
        if rng.random() < 0.1:
            body = _spoiled_bytes(body, rng)
        yield rng.choice([200] * 60 + [204, 301, 307, 401, 404, 422, 429, 500, 503]), body


def _right(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randrange(1000) for _ in range(rng.randint(0, 7))] + [END]
    experts = np.array([[rng.randrange(3), rng.randrange(3)] for _ in range(len(ids) + 2)], "<i4")
    split = rng.randint(0, len(ids))
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": rng.choice([{"type": "stop", "matched": END}, {"type": "length", "length": len(ids)}]),
            "prompt_tokens": 3,
            "output_token_logprobs": [[-0.25, token, None] for token in ids],
            "weight_versions": [
                {"version": "default", "start": 0, "end": split},
                {"version": "run.1", "start": split, "end": len(ids)},
            ],
            "routed_experts": base64.b64encode(experts.tobytes()).decode(),
        },
    }


def _spoil(value: Any, rng: random.Random) -> None:
    """Replace, remove or repeat something, anywhere inside ``value``."""
    if not isinstance(value, dict | list) or not value:
        return
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.7:
        _spoil(value[key], rng)
    elif rng.random() < 0.2:
        del value[key]
    elif isinstance(value, list) and rng.random() < 0.2:
        value[key:key] = [value[key]] * rng.choice([1, 1, 1000])
    else:
        value[key] = _junk(rng)


def _junk(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice([1, 50, 900])):
        deep = [deep]
    numbers = [0, -1, 1, 3, 1.5, -0.0, 2**31, 2**63, 10**400, -(10**12), 10**12, float("nan"), float("inf"), 1e308]
    words = [
        "",
        "stop",
        "abort",
        "NaN happened",
        "default",
        "run.1",
        "fill",
        "\x00",
        "x" * 5000,
        "AAAA",
        "AAA",
        "/etc/passwd",
    ]
    others = [None, True, False, deep, {}, {"type": "abort", "status_code": 500}, {"type": "abort"}, {"type": ["stop"]}]
    return rng.choice([*numbers, *words, *others, [rng.choice(numbers) for _ in range(3)]])


def _spoiled_bytes(body: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(body))
    return rng.choice(
        [
            b"",
            b"null",
            b"[" * 100_000,
            b"<html>busy</html>",
            b"\xff\xfe\x00",
            b'"' + b"a" * 10_000 + b'"',
            b"1" * 10_000,
            body[:place],
            body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :],
            body + body,
        ]
    )
