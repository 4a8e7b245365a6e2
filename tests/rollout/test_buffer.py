"""RolloutBuffer that are played while the trainer trains: how far ahead, in which order, and what becomes of what takes long."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from testing.fakes import make_trajectory, make_turn

from vlmrl.config import Algo, Rollout, Train
from vlmrl.data import TaskStream
from vlmrl.rollout.buffer import AsynchronousBuffer, Idle, Lengths
from vlmrl.rollout.runner import RolloutError, Runner
from vlmrl.types import Task


class Tasks:
    """Task ``n`` is number ``n % 100``."""

    def __len__(self):
        return 100

    def draw(self, number):
        return Task(str(number % 100), [])

    def fits(self, task):
        return True


class Hand:
    """A loop whose episodes end when the test says so; each then has one token of the first version and one of the last."""

    def __init__(self, **rollout):
        self.engine = SimpleNamespace(policy_version=0)
        self.config = Rollout(group_size=2, max_refills=0, **rollout)
        self.started, self.gates, self.failing = [], defaultdict(asyncio.Event), set()

    async def play(self, task, group_id, trajectory_id):
        number = int(group_id.removeprefix("group"))
        if number not in self.started:
            self.started.append(number)
        version = self.engine.policy_version
        await self.gates[number].wait()
        if number in self.failing:
            return make_trajectory(trajectory_id, [], ending="error", error="broken")
        turn = make_turn([1], [5, 6], [-0.1, -0.2], policy_versions=[version, self.engine.policy_version])
        reward = float(trajectory_id.endswith("1") or number % 2)  # even groups differ in their rewards
        return replace(make_trajectory(trajectory_id, [turn], final_reward=reward), group_id=group_id, task=task)


class Play:
    """A buffer of batches of 2 groups over a :class:`Hand`."""

    def __init__(self, filters=(), mode="off", tasks=None, **train):
        self.hand = Hand(max_failed_fraction=train.pop("max_failed_fraction", 1.0))
        algo = Algo(filters=("zero_variance",), dynamic_sampling=mode) if mode != "off" else Algo()
        train = Train(groups_per_batch=2, **train)
        self.buffer = AsynchronousBuffer(Runner(self.hand), TaskStream(Tasks()), filters, algo, train)

    async def finish(self, *numbers):
        for number in numbers:
            self.hand.gates[number].set()
        await self.rest()

    async def rest(self):
        for _ in range(30):
            await asyncio.sleep(0)

    async def take(self):
        """The numbers of the groups of the next batch, which has to be ready; it is trained."""
        batch = await asyncio.wait_for(self.buffer.take(1), 5)
        self.hand.engine.policy_version += 1
        self.buffer.trained()
        await self.rest()
        return [int(group[0].group_id[5:]) for group in batch.groups], batch

    async def begin(self):
        self.waiting = asyncio.create_task(self.buffer.take(1))
        await self.rest()

    async def start(self):
        """Before the first batch is wanted."""
        self.buffer.trained()
        await self.rest()


def differ(group):
    return len({trajectory.reward for trajectory in group}) > 1


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 20))


def test_groups_are_started_only_as_far_ahead_as_staleness_allows():
    async def go():
        play = Play(max_staleness=1)
        await play.begin()
        assert play.hand.started == [0, 1, 2, 3]
        await play.finish(1, 2, 3)
        assert not play.waiting.done()  # it waits for the first, though three are ready
        await play.finish(0)
        batch = await play.waiting
        assert [group[0].group_id for group in batch.groups] == ["group000000", "group000001"]
        assert play.hand.started == [0, 1, 2, 3]  # the batch is in training
        play.hand.engine.policy_version = 1
        play.buffer.trained()
        await play.rest()
        assert play.hand.started == [0, 1, 2, 3, 4, 5]
        await play.buffer.close()

    run(go())


def test_in_the_order_of_their_start_no_group_grows_too_old_and_none_is_lost():
    async def go():
        play, oldest, taken = Play(max_staleness=2), [], []
        await play.start()
        for _ in range(5):
            await play.finish(*reversed(play.hand.started))
            numbers, _ = await play.take()
            taken += numbers
            oldest.append(play.buffer.metrics()["staleness/max"])
        assert taken == list(range(10))
        assert oldest == [0, 1, 2, 2, 2]
        assert play.buffer.metrics()["length_bias/turns"] == 1.0
        await play.buffer.close()

    run(go())


def test_with_corrections_what_is_ready_is_trained_and_what_is_late_comes_later():
    async def go():
        play = Play(max_staleness=1, too_old="correct")
        await play.begin()
        await play.finish(1, 2, 3)
        assert [group[0].group_id[-1] for group in (await play.waiting).groups] == ["1", "2"]
        play.hand.engine.policy_version = 1
        play.buffer.trained()
        await play.rest()
        await play.finish(4)
        assert (await play.take())[0] == [3, 4]
        await play.finish(0, 5)
        numbers, _ = await play.take()
        assert numbers == [0, 5]
        told = play.buffer.metrics()
        assert (told["staleness/max"], told["staleness/too_old"]) == (2, 1)
        assert told["staleness/mean"] == pytest.approx((2 + 0 + 1 + 0) / 4)  # each group: its first and its last token
        await play.buffer.close()

    run(go())


def test_groups_that_are_too_old_are_dropped_counted_and_replaced():
    async def go():
        play = Play(max_staleness=1, too_old="drop")
        await play.start()
        await play.finish(1, 2, 3)
        assert (await play.take())[0] == [1, 2]
        await play.finish(4)
        assert (await play.take())[0] == [3, 4]
        await play.finish(0, 5, 6, 7)
        numbers, batch = await play.take()
        assert (numbers, batch.too_old) == ([5, 6], 1)
        assert play.hand.started == list(range(11))
        assert len(play.buffer.state()["unfinished"]) == 4
        await play.buffer.close()

    run(go())


def test_a_broken_group_makes_room_for_another():
    async def go():
        play = Play(max_staleness=1)
        play.hand.failing = {0}
        await play.begin()
        await play.finish(0, 1, 2)
        batch = await play.waiting
        assert [group[0].group_id[-1] for group in batch.groups] == ["1", "2"]
        assert (batch.rollouts.dropped_groups, len(batch.rollouts.failed)) == (1, 2)
        assert play.hand.started == [0, 1, 2, 3, 4]
        await play.buffer.close()

    run(go())


def test_too_many_failures_and_errors_reach_who_takes():
    async def go():
        play = Play(max_staleness=1, max_failed_fraction=0.25)
        play.hand.failing = {0}
        await play.begin()
        await play.finish(0)
        with pytest.raises(RolloutError, match=r"2 trajectories failed where 4 were asked for(.|\n)*broken"):
            await play.waiting
        await play.buffer.close()

    run(go())


@pytest.mark.parametrize(
    ("mode", "expected", "filtered"),
    [("off", [0], 1), ("filter", [0, 2], 1), ("replace", [0, 0], 1)],
)
def test_filters_leave_the_batch_short_fill_it_or_repeat_what_passed(mode, expected, filtered):
    async def go():
        play = Play(filters=[differ], mode=mode, max_staleness=1)
        await play.start()
        await play.finish(0, 1, 2, 3)
        numbers, batch = await play.take() if mode != "replace" else (expected, await play.buffer.take(1))
        names = [group[0].group_id.partition("+")[0] for group in batch.groups]
        assert names == [f"group{number:06d}" for number in expected] and numbers == expected
        assert batch.filtered >= filtered
        assert len(batch.rollouts.groups) == len({*expected, 1}) + (mode == "filter")  # what was left out is told, too
        await play.buffer.close()

    run(go())


def test_filters_that_pass_nothing_end_the_run():
    async def go():
        play = Play(filters=[lambda group: False], mode="filter", max_staleness=1)
        await play.begin()
        for _ in range(60):
            await play.finish(*play.hand.started)
        with pytest.raises(RolloutError, match=r"only 0 of 2 groups passed algo\.filters"):
            await play.waiting
        await play.buffer.close()

    run(go())


def test_what_was_begun_and_not_trained_is_played_anew_after_a_resume():
    async def go():
        first = Play(max_staleness=1, too_old="correct")
        await first.start()
        await first.finish(1, 2, 3)
        await first.take()
        state = first.buffer.state()
        assert state["unfinished"] == {"0": 0, "3": 3, "4": 4, "5": 5} and state["tasks"]["drawn"] == 6
        await first.buffer.close()
        assert not first.hand.started[6:]

        second = Play(max_staleness=1, too_old="correct")
        second.buffer.restore(state)
        await second.begin()
        assert second.hand.started == [0, 3, 4, 5]
        await second.finish(0, 3)
        assert [group[0].task.id for group in (await second.waiting).groups] == ["0", "3"]
        second.buffer.trained()
        await second.rest()
        assert second.hand.started == [0, 3, 4, 5, 6, 7]
        await second.buffer.close()

    run(go())


def test_survival_shows_that_the_long_ones_are_lost():
    lengths = Lengths()
    groups = [[make_trajectory(str(turns), [make_turn([1], [5, 6], [0.0, 0.0])] * turns)] for turns in (1, 3)]
    for group in groups:
        lengths.played(group)
    assert lengths.metrics() == {}
    lengths.trained(groups[0])
    assert lengths.metrics() == {"length_bias/turns": 0.5, "length_bias/sampled_tokens": 0.5}
    lengths.trained(groups[1])
    assert lengths.metrics()["length_bias/turns"] == 1.0


def test_seconds_without_play_are_counted_once():
    idle = Idle()
    assert idle.spent() == 0.0
    idle.begin()
    first, second = idle.spent(), idle.spent()
    assert first > 0 and second > 0
    idle.end()
    idle.spent()
    assert idle.spent() == 0.0
    assert np.isfinite(first + second)
