"""Long episodes: what the loop does per turn does not grow with the turn's number. Counted, not timed."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest
from testing.episodes import a_task, image, renderer, turn_loop

from vlmrl.env.base import Env, obs
from vlmrl.rollout.teacher_rows import seen_messages
from vlmrl.samples import audit, concat, merge_prefixes, step_wise


class Long(Env):
    """The same observation again and again, with a new image of 64 tokens each where ``images`` is set."""

    def __init__(self, task, images=False):
        super().__init__(task)
        self.images = images

    def step(self, response_text):
        done = self.turn == self.max_turns - 1
        shade = (self.turn * 10 % 256, 7, 7)
        return obs("Go on.", [image(shade, (256, 256))] if self.images else None), done, {"reward": 1.0}


def play(monkeypatch, turns, images):
    """The trajectory, the store, and how many characters the tokenizer encoded for each turn's prompt."""
    encoded = []
    encode = renderer().encode_written

    def counting(text):
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(renderer(), "encode_written", counting)
    options = {"images": images}
    loop = turn_loop(Long, lambda request, turn: "On.", options=options, max_turns=turns, max_tokens=40_000)
    trajectory = asyncio.run(loop.play(a_task(), "g", "g/0"))
    return trajectory, loop.store, encoded


@pytest.mark.parametrize(("turns", "images"), [(200, False), (20, True)])
def test_each_turn_encodes_its_own_observation_and_nothing_else(monkeypatch, turns, images):
    trajectory, store, encoded = play(monkeypatch, turns, images)
    assert (trajectory.ending, len(trajectory.turns)) == ("env_done", turns)
    assert len(encoded) == turns and len(set(encoded[2:])) == 1  # deltas of one length; the first also renders the base
    assert (store.seen, store.processed) == ((turns - 1, turns - 1) if images else (0, 0))
    assert len({len(turn.prompt_ids) for turn in trajectory.turns[1:]}) == 1


def test_rows_of_a_long_episode_share_images_and_merge_into_one(monkeypatch):
    trajectory, _, _ = play(monkeypatch, 20, True)
    rows = step_wise(trajectory)
    assert len({id(item) for row in rows for item in row.media}) == 19  # 190 occurrences of 19 images
    assert sum(len(row.media) for row in rows) == 190
    (merged,) = merge_prefixes(rows)
    (joined,) = concat(trajectory)
    merged.rewards = joined.rewards  # a step-wise row has the whole reward on the last token
    assert merged == joined
    audit(rows, [trajectory], image_token_id=renderer().image_token_id)


def test_a_teacher_may_see_all_of_an_episode_with_more_turns_than_pythons_stack_has_calls(monkeypatch):
    """It was a RecursionError, which ended the run, as an error in `teacher.sees` does."""
    trajectory, _, _ = play(monkeypatch, 2, False)
    first, second = trajectory.turns
    count = sys.getrecursionlimit()
    trajectory.turns = [first, *(replace(second, parent=number) for number in range(count))]
    seen = seen_messages(trajectory, count)
    assert [message["role"] for message in seen[1:]] == ["assistant", "user"] * count
    assert seen[-2:] == seen[1:3] and seen[-1] is not seen[2]
