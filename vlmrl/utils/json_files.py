"""Reads JSON that others write: files that may be missing or half written, and texts with numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; ``None`` if there is no such file, or something else in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def strict_json(text: str) -> Any:
    """As ``json.loads``, which also takes ``NaN`` and ``Infinity`` and makes ``1e999`` infinite: here they raise ValueError."""
    return json.loads(text, parse_constant=_reject_constant, parse_float=_finite)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
