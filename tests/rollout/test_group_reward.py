"""A reward of a whole group: when it is called, what it adds, and its failures."""

import asyncio
import math
import threading
import time
from contextlib import suppress

import pytest
import torch
from testing.episodes import a_task, turn_loop
from testing.fakes import make_trajectory, make_turn

from vlmrl.algos import choose_all
from vlmrl.config import Algo, Config, Data, Eval, EvalData, Optim, Rollout, Train
from vlmrl.env.base import Env, obs
from vlmrl.report.metrics import trajectory_metrics
from vlmrl.report.progress import RunProgress
from vlmrl.report.records import trajectory_record
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.batches import fill
from vlmrl.rollout.group_reward import GroupReward, resolve_group_reward
from vlmrl.rollout.runner import RolloutError, Runner
from vlmrl.run import loop
from vlmrl.run.build import build_run
from vlmrl.samples import audit, emit
from vlmrl.train.turn_states import rewards_by_turn


class Paid(Env):
    def step(self, response_text):
        return obs(), True, {"reward": 1.0}


def rank(group):
    """The longest response gets 3, the next 2, and so on."""
    order = sorted(group, key=lambda trajectory: -trajectory.num_sampled)
    return [3.0 - order.index(trajectory) for trajectory in group]


def runner(function, **rollout):
    responses = lambda request, turn: "a" * (1 + int(request.trajectory_id[-1]))  # noqa: E731
    config = Config(group_reward=function, rollout=Rollout(max_env_retries_per_turn=1, env_timeout=600.0))
    return Runner(turn_loop(Paid, responses, group_size=3, **rollout), group_reward=resolve_group_reward(config))


def tasks(count=100):
    return iter([a_task(id=str(number)) for number in range(count)])


def play(function, count=2, **rollout):
    return asyncio.run(runner(function, **rollout).play(tasks(), count, "s"))


async def rank_later(group):
    await asyncio.sleep(0)
    return tuple(rank(group))


@pytest.mark.parametrize("function", [rank, rank_later, lambda group: torch.tensor(rank(group))])
def test_each_whole_group_is_judged_once_and_the_numbers_are_added(function):
    rollouts = play(function)
    assert [[t.reward for t in group] for group in rollouts.groups] == [[2.0, 3.0, 4.0]] * 2
    trajectory = rollouts.groups[0][2]
    assert (trajectory.group_reward, trajectory.turn_rewards) == (3.0, [1.0])
    metrics = trajectory_metrics(rollouts.trajectories)
    assert metrics["group_reward/mean"] == 2.0 and metrics["reward/mean"] == 3.0
    assert trajectory_record(rollouts.trajectories[2], 1, "train")["group_reward"] == 3.0


@pytest.mark.parametrize("how", ["concat", "step_wise", "merged"])
def test_rows_of_every_kind_carry_it_through_the_audit(how):
    trajectory = make_trajectory(
        turns=[make_turn([1], [5, 6], [-0.1, -0.2], reward=0.25), make_turn([7], [8], [-0.3])], group_reward=0.5
    )
    rows = emit(trajectory, how)
    audit(rows, [trajectory], image_token_id=None)
    assert trajectory.reward == sum(row.reward for row in rows) == 1.75
    assert rewards_by_turn(trajectory) == [0.25, 1.5]


def test_rows_of_the_rollout_are_rewarded_on_the_last_sampled_token():
    trajectory = make_trajectory(turns=[make_turn([1], [5, 6], [-0.1, -0.2])])
    trajectory.samples = emit(trajectory, "concat")
    trajectory.samples[-1].loss_mask[-1] = 0
    asyncio.run(GroupReward(lambda group: [0.5], timeout=600, tries=1).give([trajectory]))
    assert trajectory.samples[-1].rewards == {0: 0.5, 1: 1.0}


def test_a_function_that_takes_turns_from_its_trajectories_takes_none_from_training():
    def longest(group):
        return [float(trajectory.turns.pop().text.count("a")) for trajectory in group]

    for group in play(longest).groups:
        assert [(len(trajectory.turns), trajectory.group_reward) for trajectory in group] == [
            (1, 1.0),
            (1, 2.0),
            (1, 3.0),
        ]


def test_filters_see_what_the_group_added():
    keep = choose_all(Algo(filters=("zero_variance",)), "filters")
    judged = asyncio.run(fill(runner(rank), tasks(), 2, "s", keep, "off"))
    alike = asyncio.run(fill(runner(None), tasks(), 2, "s", keep, "off"))
    assert (judged.filtered, alike.filtered) == (0, 2)


@pytest.mark.parametrize(
    "answer", [[1.0, 2.0], None, 1.0, [1.0, math.nan, 2.0], ["a", "b", "c"], {"a": 1, "b": 2, "c": 3}]
)
def test_anything_but_a_finite_number_for_each_stops_the_run_by_name(answer):
    def odd(group):
        return answer

    with pytest.raises(ValueError, match=r"group_reward .*odd: it must return one finite number for each of 3"):
        play(odd)


def test_a_function_that_fails_once_is_asked_again():
    calls = []

    def shaky(group):
        calls.append(group[0].group_id)
        if len(calls) == 1:
            raise ConnectionError("the judge is away")
        return [1.0] * 3

    rollouts = play(shaky, count=1)
    assert calls == ["s/00000"] * 2 and rollouts.failed == [] and rollouts.trajectories[0].reward == 2.0


def test_a_group_that_cannot_be_judged_is_dropped_and_never_scored():
    def picky(group):
        if group[0].task.id == "0":
            raise ConnectionError("the judge is away")
        return [0.0] * 3

    rollouts = play(picky, count=2, max_failed_fraction=0.5)
    assert [group[0].task.id for group in rollouts.groups] == ["1", "2"]
    assert rollouts.dropped_groups == 1 and len(rollouts.failed) == 3
    assert rollouts.failed[0].ending == "error" and rollouts.failed[0].group_reward is None


def test_one_that_always_fails_stops_the_run_by_name():
    def broken(group):
        raise KeyError("score")

    with pytest.raises(RolloutError, match=r"group_reward .*broken: KeyError: 'score'"):
        play(broken)


def test_one_that_hangs_is_given_up():
    trajectory = make_trajectory()
    asyncio.run(GroupReward(lambda group: threading.Event().wait(), timeout=0.05, tries=2).give([trajectory]))
    assert trajectory.failed and trajectory.error.endswith("no answer in 0.05 s")


@pytest.mark.parametrize("how", ["blocks", "goes on when it is cancelled"])
def test_an_async_one_that_hangs_is_given_up_and_holds_up_no_event_loop(how):
    release = threading.Event()

    async def hangs(group):
        if how == "blocks":
            assert release.wait(600)  # as requests.post() without an answer
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def give():
        try:
            await GroupReward(hangs, timeout=0.05, tries=2).give([trajectory])
        finally:
            release.set()

    trajectory = make_trajectory()
    asyncio.run(give())
    assert trajectory.failed and "no answer in 0.05 s" in trajectory.error
    assert ("make it a plain function" in trajectory.error) == (how == "blocks")


def test_the_time_of_an_async_one_begins_when_it_is_called():
    """Those that block the loop with some computing take turns: together they may take longer than one may."""

    async def computes(group):
        time.sleep(0.5)
        return [1.0]

    async def give():
        await asyncio.gather(*(GroupReward(computes, timeout=2.0, tries=1).give([each]) for each in trajectories))

    trajectories = [make_trajectory() for _ in range(6)]
    asyncio.run(give())
    assert [each.group_reward for each in trajectories] == [1.0] * 6


def test_an_async_one_behind_one_that_blocks_is_called_in_another_loop():
    release = threading.Event()

    async def rewards(group):
        if group[0].id == "blocks":
            assert release.wait(600)
        return [1.0]

    async def give():
        try:
            reward = GroupReward(rewards, timeout=1.0, tries=1)
            await asyncio.gather(*(reward.give([each]) for each in trajectories))
        finally:
            release.set()

    trajectories = [make_trajectory(id="blocks"), make_trajectory(id="waits")]
    asyncio.run(give())
    assert trajectories[0].failed and trajectories[1].group_reward == 1.0


def test_what_is_no_function_of_a_group_is_refused_at_the_start(tmp_path):
    (tmp_path / "mine.py").write_text("def two(group, other):\n    return []\n\nNUMBER = 3\n")
    with pytest.raises(ValueError, match=r"group_reward must be callable as two\(trajectories\)"):
        resolve_group_reward(Config(group_reward=f"{tmp_path}/mine.py:two"))
    with pytest.raises(ValueError, match=r"group_reward must be a function \(trajectories\), but it is 3"):
        resolve_group_reward(Config(group_reward=f"{tmp_path}/mine.py:NUMBER"))


def test_a_run_trains_on_it_and_evaluates_without(tmp_path):
    seen = []

    def bonus(group):
        seen.append(len(group))
        return [10.0 * number for number in range(len(group))]

    data = Data(generator=lambda index, seed: {"prompt": f"Say {index}.", "answer": str(index)}, size=8)
    config = Config(
        output_dir=str(tmp_path),
        data=data,
        reward=lambda text, task: 0.0,
        group_reward=bonus,
        rollout=Rollout(group_size=2, max_tokens=128, max_response_tokens=8),
        optim=Optim(lr=1e-4),
        train=Train(steps=1, groups_per_batch=2),
        eval=Eval(data=EvalData(generator=data.generator, size=2, seed=1)),
        save_model=False,
    )
    run = build_run(config)
    with RunLog(run.folder) as log:
        asyncio.run(loop.train(run, log, RunProgress()))
        rows = log.rows()
    assert seen == [2, 2]
    trained = next(row for row in rows if "loss" in row)
    assert trained["reward/mean"] == trained["group_reward/mean"] == 5.0
    assert all(row["eval/reward/mean"] == 0.0 for row in rows if "eval/reward/mean" in row)
