"""The mathematics of geo3k's grading, which `geo3k.py` runs in a process with limits: answers are hostile input.

math-verify expands polynomials and evaluates powers, and its time-outs work in a main thread only.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that time-outs are off
# What math-verify may read: arithmetic, one-letter variables, two one-digit powers, four brackets in a row. Out of prose it
# takes a number ("\angle 4" is 4).
SAFE = re.compile(
    r"(?!.*(?:\*\*|(?:[({] ?){5}|(?:\^.*){3}))(?:\\(?:[dt]?frac|sqrt|pi|cdot|times|div|left|right|[lg]eq?)(?![a-zA-Z])"
    r"|(?<![a-zA-Z])[a-df-zA-DF-Z](?![a-zA-Z])|\^ ?(?:\d(?!\d)|\{ ?\d ?\})|[\d .,+*/:=<>(){}-])+"
)
MAX_LENGTH = 80  # characters; the longest answer of the dataset has 36


def compare(answer: str, gold: str, *others: str) -> tuple[list[float | None], bool]:
    """The numbers that the texts represent, ``None`` for what is none, and whether the first two are the same mathematics.

    ``compare("x+1", "1 + x")`` is ``([None, None], True)``; the second item is computed only if one of the two is no number.
    """
    numbers = [number(text) for text in (answer, gold, *others)]
    return numbers, None in numbers[:2] and same(answer, gold)


@lru_cache(maxsize=4096)
def read(text: str) -> list[Any]:
    """math-verify's parse of a plain text; empty if it is not simple mathematics (see ``SAFE``)."""
    is_safe = len(text) <= MAX_LENGTH and SAFE.fullmatch(text)
    return parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0) if is_safe else []


def number(text: str) -> float | None:
    """The real number that a plain text represents, or ``None``."""
    try:
        return float(read(text)[0].evalf())
    except Exception:  # nothing parsed, infinite, complex, or any other error of sympy's
        return None


def same(answer: str, gold: str) -> bool:
    try:
        right, mine = read(gold), read(answer)
        return bool(right and mine) and bool(verify(right, mine, timeout_seconds=None))
    except Exception:  # hostile input: an error of sympy's must not become an env error
        return False
