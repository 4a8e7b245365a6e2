"""A sample of hostile rows and env answers: each case ends in an answer, a counted failure or one clear error."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from hostile import env_answers, rows
from testing.hostile import CANARY, CANARY_HOST, harmless


def ended(module, cases):
    """How the cases end. An env, or a row of the user's own, may name a file; a response may not."""
    counts = Counter[str]()
    for case in cases:
        with harmless(case, allowed=(CANARY, CANARY_HOST)):
            counts[module.run(case)] += 1
    return counts


def test_hostile_rows_are_played_or_counted(how_many):
    counts = ended(rows, islice(rows.cases(random.Random(0)), how_many(60)))
    assert counts.total() == how_many(60) and len(counts) > 3


def test_hostile_conversations_are_trained_on_or_bad_rows(how_many):
    counts = Counter[str]()
    for row in islice(rows.conversations(random.Random(0)), how_many(600)):
        with harmless(row, allowed=(CANARY, CANARY_HOST)):
            counts[rows.read(row)] += 1
    assert counts["rows"] > how_many(600) / 50 and len(counts) > 4


def test_hostile_env_answers_end_in_an_answer_a_failure_or_an_error_that_names_the_env(how_many):
    counts = ended(env_answers, islice(env_answers.cases(random.Random(0)), how_many(200)))
    assert {"env_done", "error", "EnvContractError"} <= set(counts)
