"""Reads untrusted JSON: files that may be missing or half written, and texts with numbers that JSON does not allow."""

from __future__ import annotations

import json
import math
import re
import reprlib
from pathlib import Path
from typing import Any

MAX_VALUES = 1_000_000  # of a body: each takes 60 bytes or more, so that 64 MiB of `[],` would take 1.4 GiB, and no thread could run
VALUE_BYTES = 128  # that a comma or an opening bracket may take once it is parsed: `{},` has two, and takes 220
MAX_DIGITS = 400  # of a whole number: reading it takes quadratic time, while no other thread runs
SEPARATORS = (b",", b"[", b"{", rb"\u002c", rb"\u002C", rb"\u005b", rb"\u005B", rb"\u007b", rb"\u007B")
"""What comes before a value, also escaped: a text within JSON may be JSON that is read later."""
MOST_BYTES = 64 * 2**20  # of a file: ours are far smaller
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that is valid only in a pair


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; ``None`` if there is no such file, or something else in it.

    Neither a pipe nor a device is read, nor a file of more than MOST_BYTES.
    """
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        return object_of(path.read_bytes())
    except OSError:
        return None


def object_of(content: bytes) -> dict[str, Any] | None:
    """The object in the content of a JSON file; ``None`` for something else."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def strict_json(text: str) -> Any:
    """As ``json.loads``, which also takes ``NaN`` and ``Infinity`` and makes ``1e999`` infinite: here they raise ValueError."""
    return json.loads(text, parse_constant=_reject_constant, parse_float=finite_float, parse_int=short_int)


def json_body(content: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises ValueError for anything else: no JSON in UTF-8, NaN, half of a surrogate pair, nested too deeply, or over MAX_VALUES values.
    """
    check_values(content, MAX_VALUES, "the body")
    try:
        text = content.decode()
        body = strict_json(text)
        if _HALF_PAIR.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the body holds half of a surrogate pair: send valid Unicode.") from None
    except RecursionError:
        raise ValueError("the body must not be nested so deeply.") from None
    except ValueError as error:
        raise ValueError(f"the body must be JSON in UTF-8, but it is not: {str(error)[:200]}.") from None
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, but it is {reprlib.repr(body)[:100]}.")
    return body


def check_values(content: bytes, most: int, name: str) -> None:
    """Raise ValueError for a JSON text, called ``name``, that may have more than ``most`` values."""
    if sum(map(content.count, SEPARATORS)) > most:
        raise ValueError(f"{name} must not have more than {most} commas and opening brackets.")


def parsed_bytes(content: bytes) -> int:
    """The memory that a JSON text may take once it is parsed: for `{},{},` 75 times its size."""
    return len(content) + VALUE_BYTES * sum(map(content.count, SEPARATORS[:3]))


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def finite_float(text: str) -> float:
    """The number of a JSON text. Raises ValueError for one that a float cannot hold, such as 1e999, which ``float`` makes infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def short_int(text: str) -> int:
    """The whole number of a JSON text. Raises ValueError for one of more than MAX_DIGITS digits."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:20]} has more than {MAX_DIGITS} digits")
    return int(text)
