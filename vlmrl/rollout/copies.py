"""How much of a response is copied from its context."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.rollout.record import common_start

PIECES = 16  # of a response: a common run of an eighth of it contains one of them
MOST_TOKENS = 65536  # the last ones of each text: the rest is not compared


def longest_copy(response: Sequence[int], context: Sequence[int]) -> int:
    """The length of a longest run of tokens that both have: ``longest_copy([7, 1, 2, 3], [9, 1, 2, 3, 4])`` is 3.

    Each of 16 equal pieces of the response is searched for, and its first place in the context extended. So the time is linear. A run
    that is shorter than an eighth of the response may be missed, and one whose pieces also occur elsewhere be found shorter.
    """
    # A character for each token, since strings are searched in linear time.
    text, source = ("".join(map(chr, ids[-MOST_TOKENS:])) for ids in (response, context))
    size, longest = max(1, -(-len(text) // PIECES)), 0
    for start in range(0, len(text) - size + 1, size):
        place = source.find(text[start : start + size])
        if place >= 0:
            before = common_start(text[:start][::-1], source[max(0, place - start) : place][::-1])
            after = common_start(text[start:], source[place:])
            longest = max(longest, before + after)
    return longest
