"""A response's tokens as text, with the numbers of each: the parallel lists of a turn in ``trajectories.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from vlmrl.types import Turn

Decode = Callable[[list[int]], str]
"""Converts token ids to text, special tokens included, like a tokenizer's ``decode``."""

MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes in UTF-8, and a token at least one
DIGITS = 5  # after the decimal point, which halves the file


class TokenTexts:
    """Texts of token ids. Each id is decoded once, however often it is sampled: ``TokenTexts(tokenizer.decode).spans([5, 6])``."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._single = cache(lambda token: decode([token]))

    def spans(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Texts with their numbers of tokens: ``[("I", 1), (" see", 1), ("猫", 2)]``. Tokens of one character share a span."""
        spans: list[tuple[str, int]] = []
        start, last = 0, len(token_ids)
        for end in range(1, last + 1):
            part = token_ids[start:end]
            text = self._single(part[0]) if len(part) == 1 else self._decode(list(part))
            if not text.endswith("\ufffd") or end - start == MAX_CHARACTER_TOKENS or end == last:
                spans.append((text, end - start))
                start = end
        return spans


def token_columns(turn: Turn, texts: TokenTexts) -> dict[str, list[Any] | None]:
    """``tokens``, ``logprobs``, ``trainer_logprobs``, ``teacher_logprobs``, ``advantages`` and ``loss_mask`` of a response: lists
    of one length, or ``None``.

    An entry is a span of :meth:`TokenTexts.spans`: its logprob is the sum over its tokens, its advantage and mask those of the last
    one. A list of what is not known is ``None``; so is an entry of ``trainer_logprobs`` and ``advantages`` for a token that no sample
    contains, and of ``teacher_logprobs`` for one that the teacher did not score.
    """
    spans = texts.spans(turn.response_ids)
    counts = [count for _, count in spans]
    trained, theirs = turn.trained, None
    if trained is not None and trained.teacher_logprobs is not None:
        theirs = _sums(trained.teacher_logprobs.tolist(), counts)
    return {
        "tokens": [text for text, _ in spans],
        "logprobs": _sums(turn.logprobs, counts),
        "trainer_logprobs": None if trained is None else _sums(trained.logprobs.tolist(), counts),
        "teacher_logprobs": None if theirs is None else [each if each != "nan" else None for each in theirs],
        "advantages": None if trained is None else _lasts(trained.advantages, counts),
        "loss_mask": None if trained is None else [mask or 0 for mask in _lasts(trained.loss_mask, counts)],
    }


def _sums(values: Sequence[float], counts: Sequence[int]) -> list[float | str | None] | None:
    """The sum of each span's values, ``None`` for a span that ``values`` does not reach."""
    if not values:
        return None
    return [None if part is None else _rounded(sum(part)) for part in _parts_of(values, counts)]


def _lasts(values: Sequence[float], counts: Sequence[int]) -> list[Any]:
    return [None if part is None else _rounded(part[-1]) for part in _parts_of(values, counts)]


def _parts_of(values: Sequence[float], counts: Sequence[int]) -> Iterable[Sequence[float] | None]:
    start = 0
    for count in counts:
        part = values[start : start + count]
        yield part if len(part) == count else None
        start += count


def _rounded(value: float) -> float | str:
    """A number in JSON: ``round(value, 5)``, or ``"nan"``."""
    return round(value, DIGITS) if math.isfinite(value) else str(value)
