"""How much of a response is copied from its context."""

import random

import pytest

from vlmrl.rollout.copies import MOST_TOKENS, longest_copy


@pytest.mark.parametrize(
    ("response", "context", "length"),
    [
        ([7, 1, 2, 3], [9, 1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [3, 4], 0),
        ([5], [], 0),
        ([1, 5, 6, 7], [1, 9, 5, 6, 7], 3),
        (range(100, 200), [*range(50), *range(120, 180)], 60),
    ],
)
def test_by_hand(response, context, length):
    assert longest_copy(list(response), list(context)) == length


def test_a_run_of_an_eighth_is_found_wherever_it_is():
    """Tokens that occur once, so that the plain search over all places finds nothing longer."""
    for seed in range(200):
        rng = random.Random(seed)
        length = rng.randrange(16, 300)
        size = rng.randrange(-(-length // 8) + 1, length + 1)
        start = rng.randrange(length - size + 1)
        response = list(range(1000, 1000 + length))
        context = [*range(500), *response[start : start + size], *range(500, 800)]
        assert longest_copy(response, context) == size


def test_of_long_texts_the_end_is_compared():
    """Text that is equal everywhere is the worst case of a search."""
    assert longest_copy([1] * 2**20, [1] * 2**23) == MOST_TOKENS
    assert longest_copy([1] * 2**20 + [2], [1] * 2**23) == MOST_TOKENS - 1
