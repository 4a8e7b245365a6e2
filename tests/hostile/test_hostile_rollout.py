"""A sample of hostile rows and env answers: each case ends in an answer, a counted failure or one clear error."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from hostile import env_answers, rows


def test_hostile_rows_are_played_or_counted(how_many):
    ended = Counter(map(rows.run, islice(rows.cases(random.Random(0)), how_many(60))))
    assert ended.total() == how_many(60) and len(ended) > 3


def test_hostile_env_answers_end_in_an_answer_a_failure_or_an_error_that_names_the_env(how_many):
    ended = Counter(map(env_answers.run, islice(env_answers.cases(random.Random(0)), how_many(200))))
    assert {"env_done", "error", "EnvContractError"} <= set(ended)
