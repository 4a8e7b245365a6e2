"""A sample of the hostile texts; see `text.py`."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from itertools import islice

import pytest
from hostile.text import cases, outcome


def sample(kinds: set[str], number: int, seed: int = 0):
    return islice((case for case in cases(random.Random(seed)) if case["kind"] in kinds), number)


def test_hostile_texts_end_in_an_answer_or_an_explained_error(how_many):
    kinds = {"response", "messages"} | ({"blocks"} if importlib.util.find_spec("mcp") else set())
    seen = Counter(outcome(case) for case in sample(kinds, how_many(300)))
    assert {"judged", "explained", "called", "rendered"} <= set(seen)


@pytest.mark.slow  # mathematics runs in a process of its own
def test_hostile_mathematics_ends_in_a_verdict(how_many):
    assert set(map(outcome, sample({"answer"}, how_many(20)))) <= {"right", "wrong"}
