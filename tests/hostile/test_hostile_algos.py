"""A sample of the generated settings and rewards: each is refused by name, or gives finite advantages."""

import random
from collections import Counter
from itertools import islice

from hostile.algos import cases, outcome


def test_generated_settings_and_rewards(how_many):
    outcomes = Counter(outcome(case) for case in islice(cases(random.Random(0)), how_many(600)))
    assert outcomes["assigned"] > 50 and outcomes["refused"] > 50
