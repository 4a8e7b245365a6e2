"""The asynchronous buffer: staleness, the order of groups, slow groups, filters, and resuming."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from testing.fakes import make_trajectory, make_turn

from vlmrl.config import Algo, Rollout, Train
from vlmrl.data import TaskStream
from vlmrl.rollout.batches import MAX_REJECTED
from vlmrl.rollout.buffer import AsynchronousBuffer, IdleTimer, LengthBias, SynchronousBuffer
from vlmrl.rollout.runner import RolloutError, Runner
from vlmrl.types import Task
from vlmrl.utils.threads import run_awake


class Tasks:
    """Task ``n`` is number ``n % 100``."""

    def __len__(self):
        return 100

    def draw(self, number):
        return Task(str(number % 100), [])

    def limit_of(self, task):
        return None


class ManualLoop:
    """A loop whose episodes end when the test opens their gate; each has one token of its first and one of its last version."""

    def __init__(self, **rollout):
        self.engine = SimpleNamespace(policy_version=0)
        self.config = Rollout(group_size=2, max_refills=0, **rollout)
        self.started, self.gates, self.failing = [], defaultdict(asyncio.Event), set()
        self.tasks, self.turns = {}, defaultdict(lambda: 1)  # by group: its task's id, its number of turns

    async def play(self, task, group_id, trajectory_id):
        number = int(group_id.removeprefix("group"))
        if number not in self.started:
            self.started.append(number)
        self.tasks[number] = task.id
        version = self.engine.policy_version
        await self.gates[number].wait()
        if number in self.failing:
            return make_trajectory(trajectory_id, [], ending="error", error="broken")
        turn = make_turn([1], [5, 6], [-0.1, -0.2], policy_versions=[version, self.engine.policy_version])
        reward = float(trajectory_id.endswith("1") or number % 2)  # even groups differ in their rewards
        turns = [turn] * self.turns[number]
        return replace(make_trajectory(trajectory_id, turns, final_reward=reward), group_id=group_id, task=task)


class Play:
    """A buffer of batches of 2 groups over a :class:`ManualLoop`."""

    def __init__(self, filters=(), mode="off", tasks=None, **train):
        self.loop = ManualLoop(max_failed_fraction=train.pop("max_failed_fraction", 1.0))
        algo = Algo(filters=("zero_variance",), dynamic_sampling=mode) if mode != "off" else Algo()
        train = Train(groups_per_batch=2, **train)
        self.buffer = AsynchronousBuffer(Runner(self.loop), TaskStream(Tasks()), filters, algo, train)

    async def finish(self, *numbers):
        for number in numbers:
            self.loop.gates[number].set()
        await self.rest()

    async def rest(self):
        """Until every group that was drawn is in play."""
        for _ in range(30):
            await asyncio.sleep(0)
            while not set(self.buffer._playing) <= set(self.loop.started):
                await asyncio.sleep(0.001)  # its task is read in a thread

    async def take(self):
        """The numbers of the groups of the next batch, which has to be ready; it is trained."""
        batch = await asyncio.wait_for(self.buffer.take(1), 600)
        self.loop.engine.policy_version += 1
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


async def test_groups_are_started_only_as_far_ahead_as_staleness_allows():
    play = Play(max_staleness=1)
    await play.begin()
    assert play.loop.started == [0, 1, 2, 3]
    await play.finish(1, 2, 3)
    assert not play.waiting.done()  # it waits for the first, though three are ready
    await play.finish(0)
    batch = await play.waiting
    assert [group[0].group_id for group in batch.groups] == ["group000000", "group000001"]
    assert play.loop.started == [0, 1, 2, 3]  # the batch is in training
    play.loop.engine.policy_version = 1
    play.buffer.trained()
    await play.rest()
    assert play.loop.started == [0, 1, 2, 3, 4, 5]
    await play.buffer.close()


async def test_waiting_keeps_every_group_within_max_staleness():
    play, oldest, taken = Play(max_staleness=2), [], []
    await play.start()
    for _ in range(5):
        await play.finish(*reversed(play.loop.started))
        numbers, _ = await play.take()
        taken += numbers
        oldest.append(play.buffer.metrics()["staleness/max"])
    assert taken == list(range(10))
    assert oldest == [0, 1, 2, 2, 2]
    assert play.buffer.metrics()["length_bias/turns"] == 1.0
    await play.buffer.close()


async def test_with_corrections_late_groups_are_trained_later():
    play = Play(max_staleness=1, too_old="correct")
    await play.begin()
    await play.finish(1, 2, 3)
    assert [group[0].group_id[-1] for group in (await play.waiting).groups] == ["1", "2"]
    play.loop.engine.policy_version = 1
    play.buffer.trained()
    await play.rest()
    await play.finish(4)
    assert (await play.take())[0] == [3, 4]
    await play.finish(0, 5)
    numbers, _ = await play.take()
    assert numbers == [0, 5]
    metrics = play.buffer.metrics()
    assert (metrics["staleness/max"], metrics["staleness/too_old"]) == (2, 1)
    assert metrics["staleness/mean"] == pytest.approx((2 + 0 + 1 + 0) / 4)  # each group: its first and its last token
    await play.buffer.close()


async def test_groups_that_are_too_old_are_dropped_counted_and_replaced():
    play = Play(max_staleness=1, too_old="drop")
    await play.start()
    await play.finish(1, 2, 3)
    assert (await play.take())[0] == [1, 2]
    await play.finish(4)
    assert (await play.take())[0] == [3, 4]
    await play.finish(0, 5, 6, 7)
    numbers, batch = await play.take()
    assert (numbers, batch.too_old) == ([5, 6], 1)
    assert play.loop.started == list(range(11))
    assert len(play.buffer.state()["unfinished"]) == 4
    await play.buffer.close()


async def test_a_broken_group_makes_room_for_another():
    play = Play(max_staleness=1)
    play.loop.failing = {0}
    await play.begin()
    await play.finish(0, 1, 2)
    batch = await play.waiting
    assert [group[0].group_id[-1] for group in batch.groups] == ["1", "2"]
    assert (batch.rollouts.dropped_groups, len(batch.rollouts.failed)) == (1, 2)
    assert play.loop.started == [0, 1, 2, 3, 4]
    play.buffer.trained()
    await play.rest()
    await play.finish(3, 4)
    _, following = await play.take()
    assert (following.rollouts.dropped_groups, following.rollouts.failed) == (0, [])
    await play.buffer.close()


async def test_a_batch_in_training_counts_when_a_broken_group_is_replaced():
    play = Play(max_staleness=1)
    play.loop.failing = {2}
    await play.begin()
    await play.finish(0, 1)
    await play.waiting
    await play.finish(2)
    assert play.loop.started == [0, 1, 2, 3, 4]  # 2 are in training and 2 are played
    await play.buffer.close()


async def test_groups_are_started_in_place_of_old_ones_before_the_batch_is_awaited():
    play = Play(max_staleness=1, too_old="drop")
    await play.start()
    await play.finish(0, 1, 2, 3)
    play.loop.engine.policy_version = 5
    await play.begin()
    assert play.loop.started == list(range(8))
    await play.finish(4, 5)
    batch = await play.waiting
    assert ([group[0].group_id[-1] for group in batch.groups], batch.too_old) == (["4", "5"], 4)
    await play.buffer.close()


async def test_of_groups_that_are_ready_the_earliest_started_are_taken_first():
    play = Play(max_staleness=1, too_old="correct")
    await play.start()
    for number in (3, 2, 1):
        await play.finish(number)
    assert (await play.take())[0] == [1, 2]
    metrics = play.buffer.metrics()
    assert (metrics["queue/ready"], metrics["queue/playing"]) == (1, 1)
    assert metrics["idle/trainer"] > 0
    await play.buffer.close()


async def test_seconds_in_which_no_group_is_played_are_those_after_the_last_one_ended():
    play, idle = Play(max_staleness=1), []
    await play.start()
    for finished in ([0, 1, 2, 3], [], [4, 5]):
        await play.finish(*finished)
        await play.take()
        idle.append(play.buffer.metrics()["idle/rollouts"])
    assert idle[0] > 0  # all had ended
    assert idle[1] > 0  # until the first batch was trained
    assert idle[2] == 0  # two groups were always played
    await play.buffer.close()


async def test_filtered_groups_are_played_and_not_trained():
    play = Play(filters=[differ], max_staleness=1)
    play.loop.turns |= {1: 3, 3: 3}  # odd groups have equal rewards
    await play.start()
    await play.finish(0, 1, 2, 3)
    assert (await play.take())[0] == [0]
    assert play.buffer.metrics()["length_bias/turns"] == 0.5  # 1 against a mean of 2
    await play.buffer.close()


async def test_too_many_failures_raise_in_take():
    play = Play(max_staleness=1, max_failed_fraction=0.25)
    play.loop.failing = {0, 1}
    await play.begin()
    await play.finish(0, 1)
    with pytest.raises(RolloutError, match=r"3 trajectories failed where 8 were requested(.|\n)*broken"):
        await play.waiting
    await play.buffer.close()


async def test_failures_are_a_fraction_of_all_batches_in_play():
    """Group 3 of 8 fails: an eighth of the four batches that play at once, while the first one waits for group 0."""
    play = Play(max_staleness=3, max_failed_fraction=0.2)
    play.loop.failing = {3}
    await play.begin()
    await play.finish(1, 2, 3, 4, 5, 6, 7)
    await play.finish(0)
    assert [group[0].group_id for group in (await play.waiting).groups] == ["group000000", "group000001"]
    play.buffer.trained()
    await play.rest()
    play.loop.failing = {8}  # groups 8, 9 and 10 are in play: those that were ready before do not count
    await play.finish(8)
    with pytest.raises(RolloutError, match=r"2 trajectories failed where 6 were requested"):
        await play.buffer.take(2)
    await play.buffer.close()


async def test_failures_are_a_fraction_of_all_groups_played_since_the_last_batch():
    play = Play(filters=[lambda group: False], mode="filter", max_staleness=1, max_failed_fraction=0.25)
    play.loop.failing = {9}
    await play.begin()
    for _ in range(4):
        await play.finish(*play.loop.started)
    assert play.buffer._error is None and play.buffer._batch.rollouts.failed  # 2 trajectories, of 20 and more
    await play.buffer.close()
    play.waiting.cancel()


async def test_an_error_while_the_loop_trains_is_raised_by_the_next_take():
    """Nothing that is still in play could wake it."""
    play = Play(max_staleness=1, max_failed_fraction=0.25)
    play.loop.failing = {2}
    await play.begin()
    await play.finish(0, 1)
    await play.waiting
    await play.finish(2, 3)
    with pytest.raises(RolloutError, match=r"(.|\n)*broken"):
        await play.buffer.take(2)
    await play.buffer.close()


class RustPanic(BaseException):
    """As `pyo3_runtime.PanicException`, which extensions such as tokenizers and polars raise. It is no Exception."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("error", [RustPanic("index out of bounds"), asyncio.CancelledError(), SystemExit(3)])
def test_what_is_no_exception_ends_a_take_that_waits_for_its_group(error):
    """The group was neither ready nor in play any more, and the run waited for it for ever."""

    async def broken(task, group_id, trajectory_id):
        raise error

    async def take():
        play = Play(max_staleness=1)
        play.loop.play = broken
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await play.buffer.take(1)
        await play.buffer.close()
        return "raised"

    assert run_awake(take()) == "raised"


@pytest.mark.parametrize(
    ("mode", "expected", "filtered"),
    [("off", [0], 1), ("filter", [0, 2], 1), ("replace", [0, 0], 1)],
)
async def test_filters_shorten_a_batch_or_refill_it_or_repeat_groups(mode, expected, filtered):
    play = Play(filters=[differ], mode=mode, max_staleness=1)
    await play.start()
    await play.finish(0, 1, 2, 3)
    numbers, batch = await play.take() if mode != "replace" else (expected, await play.buffer.take(1))
    names = [group[0].group_id.partition("+")[0] for group in batch.groups]
    assert names == [f"group{number:06d}" for number in expected] and numbers == expected
    assert batch.filtered >= filtered
    assert len(batch.rollouts.groups) == len({*expected, 1}) + (mode == "filter")  # the filtered group is counted too
    await play.buffer.close()


async def test_filters_that_pass_nothing_end_the_run():
    play = Play(filters=[lambda group: False], mode="filter", max_staleness=1)
    await play.begin()
    for _ in range(60):
        await play.finish(*play.loop.started)
    assert len(play.loop.started) <= 2 * MAX_REJECTED + 4
    with pytest.raises(RolloutError, match=r"only 0 of 2 groups passed algo\.filters"):
        await play.waiting
    await play.buffer.close()


async def test_filters_end_no_run_whose_next_batch_is_ready():
    """The trainer is busy with a step, in which many groups are rejected."""
    play = Play(filters=[lambda group: int(group[0].group_id[5:]) < 2], mode="filter", max_staleness=3)
    await play.start()
    for _ in range(60):
        await play.finish(*play.loop.started)
    assert len(play.loop.started) > 2 * MAX_REJECTED + 8
    assert (await play.take())[0] == [0, 1]
    await play.buffer.close()


async def test_untrained_groups_restart_after_a_resume():
    first = Play(max_staleness=1, too_old="correct")
    await first.start()
    await first.finish(1, 2, 3)
    await first.take()
    state = first.buffer.state()
    assert state["unfinished"] == {"0": 0, "3": 3, "4": 4, "5": 5} and state["tasks"]["drawn"] == 6
    await first.buffer.close()
    assert not first.loop.started[6:]

    second = Play(max_staleness=1, too_old="correct")
    second.buffer.restore(state)
    await second.begin()
    assert second.loop.started == [0, 3, 4, 5]
    await second.finish(0, 3)
    assert [group[0].task.id for group in (await second.waiting).groups] == ["0", "3"]
    second.buffer.trained()
    await second.rest()
    assert second.loop.started == [0, 3, 4, 5, 6, 7]
    assert {number: second.loop.tasks[number] for number in (4, 5, 6, 7)} == {4: "4", 5: "5", 6: "6", 7: "7"}
    await second.buffer.close()


async def test_a_resume_with_a_smaller_staleness_restarts_no_more_groups_than_that_allows():
    play = Play(max_staleness=1)
    unfinished = {str(number): number for number in range(2, 9)}
    state = {"tasks": {"drawn": 9, "too_long": 0}, "started": 9, "unfinished": unfinished}
    play.buffer.restore(state)
    await play.rest()
    assert play.loop.started == [2, 3, 4, 5] and play.buffer.state() == state
    for taken in ([2, 3], [4, 5], [6, 7], [8, 9]):
        await play.finish(*play.loop.started)
        assert (await play.take())[0] == taken
        assert play.buffer.metrics()["staleness/max"] <= 1
    await play.buffer.close()


async def test_a_synchronous_run_plays_the_groups_that_an_asynchronous_one_had_in_play():
    """Draws 5, 2 and 7 were in play, of 9. A checkpoint of the synchronous run has those that it has not reached."""

    class AtOnce(ManualLoop):
        async def play(self, task, group_id, trajectory_id):
            turn = make_turn([1], [5], [-0.1])
            return replace(make_trajectory(trajectory_id, [turn], final_reward=1.0), group_id=group_id, task=task)

    async def played(state):
        loop, train = AtOnce(), Train(groups_per_batch=2)
        buffer = SynchronousBuffer(Runner(loop), TaskStream(Tasks()), (), Algo(), train)
        buffer.restore(state)
        batch = await buffer.take(1)
        await buffer.close()
        return [group[0].task.id for group in batch.groups], json.loads(json.dumps(buffer.state()))

    state = {"tasks": {"drawn": 9, "too_long": 0}, "started": 4, "unfinished": {"1": 5, "2": 2, "3": 7}}
    tasks, state = await played(state)
    assert (tasks, state["unfinished"], state["tasks"]["drawn"]) == (["5", "2"], {"3": 7}, 9)
    assert (await played(state))[0] == ["7", "9"]


def test_length_bias_shows_that_long_trajectories_are_lost():
    lengths = LengthBias()
    groups = [[make_trajectory(str(turns), [make_turn([1], [5, 6], [0.0, 0.0])] * turns)] for turns in (1, 3)]
    for group in groups:
        lengths.add_played(group)
    assert lengths.metrics() == {}
    lengths.add_trained(groups[0])
    assert lengths.metrics() == {"length_bias/turns": 0.5, "length_bias/sampled_tokens": 0.5}
    lengths.add_trained(groups[1])
    assert lengths.metrics()["length_bias/turns"] == 1.0


class Lengths(ManualLoop):
    """Groups of two. An episode of a group n in ``long`` has 3 turns, others have 1; ``failing`` has the ids that fail."""

    def __init__(self, long, failing):
        super().__init__(max_failed_fraction=1.0)
        self.long, self.failing = long, failing

    async def play(self, task, group_id, trajectory_id):
        turns = [make_turn([1], [5, 6], [0.0, 0.0])] * (3 if int(group_id.removeprefix("group")) in self.long else 1)
        bad = trajectory_id in self.failing
        fields = {"ending": "error", "error": "late", "final_reward": None} if bad else {"final_reward": 1.0}
        return replace(make_trajectory(trajectory_id, turns, **fields), group_id=group_id, task=task)


def length_bias(loop, filters=(), algo=None):
    """The metric after one batch of two groups, when everything that was started has ended."""

    async def go():
        buffer = AsynchronousBuffer(
            Runner(loop), TaskStream(Tasks()), filters, algo or Algo(), Train(groups_per_batch=2, max_staleness=1)
        )
        while len(buffer._ready) < 4:
            buffer._admit()
            await asyncio.sleep(0.001)
        await asyncio.wait_for(buffer.take(1), 600)
        await buffer.close()
        return buffer.metrics()["length_bias/turns"]

    return asyncio.run(go())


def test_length_bias_counts_failed_groups():
    """Groups 0 to 4: the long group 0 fails. Trained are groups 1 and 2, of 1 turn; played 2 x 3 + 8 x 1 turns by 10."""
    assert length_bias(Lengths({0}, {"group000000/00"})) == 1.0 / 1.4


def test_length_bias_counts_failed_members_that_were_refilled():
    """Groups 0 to 3: a member of the long group 0 fails and is refilled. Trained: 2 x 3 + 2 x 1; played: 3 x 3 + 6 x 1 by 9."""
    loop = Lengths({0}, {"group000000/00"})
    loop.config = replace(loop.config, max_refills=1)
    assert length_bias(loop) == pytest.approx(2.0 / (15 / 9))


def test_length_bias_counts_groups_that_filters_reject():
    """Groups 0 to 4: the long group 0 is rejected. Trained are groups 1 and 2, of 1 turn; played 2 x 3 + 8 x 1 turns by 10."""
    algo = Algo(filters=("zero_variance",), dynamic_sampling="filter")
    short = lambda group: len(group[0].turns) == 1  # noqa: E731
    assert length_bias(Lengths({0}, set()), [short], algo) == 1.0 / 1.4


def test_a_trajectory_that_failed_before_its_first_turn_has_no_length():
    lengths = LengthBias()
    lengths.add_played([make_trajectory("a", [make_turn([1], [5], [0.0])]), make_trajectory("b", [], ending="error")])
    lengths.add_trained([make_trajectory("a", [make_turn([1], [5], [0.0])])])
    assert lengths.metrics() == {"length_bias/turns": 1.0, "length_bias/sampled_tokens": 1.0}


def test_seconds_without_play_are_counted_once():
    idle = IdleTimer()
    assert idle.take() == 0.0
    idle.start()
    first, second = idle.take(), idle.take()
    assert first > 0 and second > 0
    idle.stop()
    idle.take()
    assert idle.take() == 0.0
    assert np.isfinite(first + second)


def test_length_bias_is_also_in_seconds_of_engine_and_env():
    lengths = LengthBias()
    for env_seconds in (1.0, 5.0):
        turn = make_turn([1], [5], [0.0], engine_seconds=1.0, env_seconds=env_seconds)
        lengths.add_played([make_trajectory("t", [turn])])
    lengths.add_trained([make_trajectory("t", [make_turn([1], [5], [0.0], engine_seconds=1.0, env_seconds=1.0)])])
    assert lengths.metrics()["length_bias/seconds"] == 0.5  # 2 s against a mean of 4 s


class InstantLoop(ManualLoop):
    """A loop whose episodes end at once."""

    async def play(self, task, group_id, trajectory_id):
        self.started.append(trajectory_id)
        turn = make_turn([1], [5], [-0.1])
        reward = float(trajectory_id.endswith("1") and task.id != "1")  # the rewards of task 1 are equal
        return replace(make_trajectory(trajectory_id, [turn], final_reward=reward), group_id=group_id, task=task)


def synchronous(filters=(), mode="off"):
    algo = Algo(filters=("zero_variance",), dynamic_sampling=mode) if mode != "off" else Algo()
    train = Train(groups_per_batch=2)
    return SynchronousBuffer(Runner(InstantLoop()), TaskStream(Tasks()), filters, algo, train)


def tasks_of(batch):
    return [group[0].task.id for group in batch.groups]


async def test_a_synchronous_batch_is_played_when_it_is_taken_and_named_after_its_step():
    buffer = synchronous()
    batch = await buffer.take(7)
    assert tasks_of(batch) == ["0", "1"]
    assert all(trajectory.id.startswith("step000007/") for trajectory in batch.trajectories)
    assert len({trajectory.id for trajectory in batch.trajectories}) == 4
    assert buffer.metrics()["data/drawn"] == 2


async def test_a_synchronous_batch_is_filtered_and_filled_up():
    assert tasks_of(await synchronous([differ]).take(1)) == ["0"]
    assert tasks_of(await synchronous([differ], "filter").take(1)) == ["0", "2"]
    assert tasks_of(await synchronous([differ], "replace").take(1)) == ["0", "0"]


async def test_a_synchronous_run_continues_with_the_next_tasks_after_a_resume():
    first, second = synchronous(), synchronous()
    await first.take(1)
    second.restore(json.loads(json.dumps(first.state())))
    assert tasks_of(await second.take(2)) == ["2", "3"]
    await second.close()


async def test_a_synchronous_run_may_be_resumed_as_an_asynchronous_one():
    first, second = synchronous(), Play(max_staleness=1)
    await first.take(1)
    second.buffer.restore(first.state())
    await second.start()
    assert {number: second.loop.tasks[number] for number in range(4)} == {0: "2", 1: "3", 2: "4", 3: "5"}
    await second.buffer.close()


class CountingLoop(InstantLoop):
    """Counts the episodes that are played at once."""

    playing = most = 0

    async def play(self, task, group_id, trajectory_id):
        self.playing += 1
        self.most = max(self.most, self.playing)
        for _ in range(5):
            await asyncio.sleep(0)  # others could begin
        self.playing -= 1
        return await super().play(task, group_id, trajectory_id)


@pytest.mark.parametrize(("max_concurrent", "most"), [(1, 1), (2, 2)])
async def test_no_more_episodes_are_played_at_once_than_max_concurrent(max_concurrent, most):
    loop, train = CountingLoop(max_concurrent=max_concurrent), Train(groups_per_batch=2, max_staleness=1)
    buffer = AsynchronousBuffer(Runner(loop), TaskStream(Tasks()), [], Algo(), train)
    await buffer.take(1)
    await buffer.close()
    assert loop.most == most
