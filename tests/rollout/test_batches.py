"""Filters, dynamic sampling and over-sampling: which groups are trained, and how the others are counted."""

from __future__ import annotations

import asyncio
import queue

import pytest
from testing.episodes import a_task, turn_loop

from vlmrl.algos import choose_all
from vlmrl.config import Algo
from vlmrl.env.base import Env, obs
from vlmrl.rollout.batches import fill, passes
from vlmrl.rollout.runner import RolloutError, Runner


class Paid(Env):
    """Every second task pays its members 0 and 1, the others pay all of them 1."""

    def step(self, response_text):
        even = int(self.task.id) % 2 == 0
        return obs(), True, {"reward": float(response_text == "1" or not even)}


def runner(env=Paid, **rollout):
    """Members 00 and 01 of a group say 0 and 1."""
    responses = lambda request, turn: str(int(request.trajectory_id[-1]) % 2)  # noqa: E731
    return Runner(turn_loop(env, responses, group_size=2, **rollout))


def tasks(count=100):
    return iter([a_task(id=str(number), seed=number) for number in range(count)])


def play(count, mode="off", filters=("zero_variance",), supply=100, **rollout):
    """A batch of ``count`` groups out of ``supply`` tasks."""
    keep = choose_all(Algo(filters=filters), "filters")
    return asyncio.run(fill(runner(**rollout), tasks(supply), count, "s", keep, mode))


def ids(batch):
    return [group[0].task.id for group in batch.groups]


def test_without_filters_a_batch_is_what_was_played():
    assert ids(play(4, filters=())) == ["0", "1", "2", "3"]


def test_a_filter_leaves_a_short_batch_and_counts():
    batch = play(4)
    assert (ids(batch), batch.filtered) == (["0", "2"], 2)
    assert len(batch.rollouts.trajectories) == 8  # the metrics include filtered groups


def test_dynamic_sampling_goes_on_until_the_batch_is_full():
    batch = play(4, "filter")
    assert (ids(batch), batch.filtered) == (["0", "2", "4", "6"], 3)
    assert len({group[0].group_id for group in batch.groups}) == 4  # later rounds have ids of their own


def test_replace_repeats_kept_groups_under_other_ids():
    batch = play(5, "replace")
    assert ids(batch) == ["0", "2", "4", "0", "2"]
    names = [trajectory.id for trajectory in batch.trajectories]
    assert len(set(names)) == 10 and names[6] == names[0] + "+1"


def test_dynamic_sampling_gives_up_or_ends_with_the_tasks():
    def never(group):
        return False

    with pytest.raises(RolloutError, match=r"s: only 0 of 2 groups passed algo.filters, and 32 did not"):
        asyncio.run(fill(runner(), tasks(), 2, "s", [never], "filter"))
    assert ids(play(8, "filter", supply=5)) == ["0", "2", "4"]


def test_a_last_group_may_need_more_rounds_than_the_others():
    def rare(group):
        return int(group[0].task.id) in (0, 1, 2, 30)

    batch = asyncio.run(fill(runner(), tasks(), 4, "s", [rare], "filter"))
    assert (ids(batch), batch.filtered) == (["0", "1", "2", "30"], 27)


def test_failures_are_a_fraction_of_all_that_was_played_for_the_step():
    """The group of task 5 fails in a round of one group."""

    class Once(Paid):
        def step(self, response_text):
            if self.task.id == "5":
                raise OSError("no")
            return super().step(response_text)

    def rare(group):
        return int(group[0].task.id) in (0, 1, 2, 6)

    def filled(limit):
        played = runner(Once, max_refills=0, max_failed_fraction=limit)
        return asyncio.run(fill(played, tasks(), 4, "s", [rare], "filter"))

    assert ids(filled(1 / 3)) == ["0", "1", "2", "6"]  # 2 of 12 trajectories failed: 6 groups of 2 were requested
    with pytest.raises(RolloutError, match="2 trajectories failed where 12 were requested") as raised:
        filled(0.15)
    assert len(raised.value.failed) == 2


def test_a_users_own_filter_by_path(tmp_path):
    (tmp_path / "mine.py").write_text("def small(group, most):\n    return int(group[0].task.id) <= most\n")
    small = f"{tmp_path}/mine.py:small"
    algo = Algo(filters=(small,), options={f"{small}.most": 1})
    batch = asyncio.run(fill(runner(), tasks(), 3, "s", choose_all(algo, "filters"), "off"))
    assert ids(batch) == ["0", "1"]
    with pytest.raises(ValueError, match=r"algo.options do not fit small: missing a required argument"):
        choose_all(Algo(filters=(small,)), "filters")


class Slow(Env):
    """Task 1 never ends; the others do at once."""

    closed: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def step(self, response_text):
        if self.task.id == "1":
            await asyncio.Event().wait()
        return obs(), True, {"reward": 1.0}

    def close(self):
        self.closed.put(self.task.id)


def test_a_filter_that_takes_members_out_of_its_group_changes_nothing():
    group = [1, 2, 3]
    assert passes(group, [lambda members: members.pop() == 3, lambda members: len(members) == 3])
    assert group == [1, 2, 3]


def test_over_sampling_stops_the_stragglers_and_closes_their_envs():
    batch = play(2, filters=(), over_sampling=1.5, env=Slow)
    assert ids(batch) == ["0", "2"]
    assert batch.rollouts.stopped_groups == 1 and batch.rollouts.failed == []
    closed = sorted(Slow.closed.get(timeout=600) for _ in range(6))
    assert closed == ["0", "0", "1", "1", "2", "2"]


def test_over_sampled_groups_count_in_the_fraction_that_failed():
    """Group 0 of 4 fails, where 2 are needed: a quarter of what is played."""

    class Unlucky(Paid):
        def step(self, response_text):
            if self.task.id == "0":
                raise OSError("no")
            return super().step(response_text)

    played = runner(Unlucky, max_refills=0, max_failed_fraction=0.25, over_sampling=2.0)
    batch = asyncio.run(fill(played, tasks(), 2, "s", [], "off"))
    assert len(batch.groups) == 2 and not batch.rollouts.bad_rows
