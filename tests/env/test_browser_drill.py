"""A small part of the browser drill; `python tests/testing/browser_drill.py` runs all of it."""

import asyncio

import pytest
from testing.browser import need_chromium
from testing.browser_drill import drill

pytestmark = pytest.mark.slow


def test_no_episode_is_scored_wrongly_while_browsers_are_killed():
    need_chromium()
    result = asyncio.run(drill(episodes=24, sessions=4, kills=3, every=3.0))
    assert result.ok, result
    assert result.counts["scored"] + result.counts["lost"] == 24
    assert result.counts["scored"] > 0 and sum(result.kinds.values()) > 0, result
