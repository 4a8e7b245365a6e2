"""The result of an evaluation: the mean, its error, and the tasks that are not in it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from testing.episodes import a_task, turn_loop

from vlmrl import Env, RetryTurn, obs
from vlmrl.rollout.runner import RolloutError, Rollouts, Runner
from vlmrl.run.evaluate import LeftOut, summarize_rollouts


class Strict(Env):
    """Rejects all replies to some tasks, crashes in others, and pays 1 or 0 in the rest."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        kind = self.task.id.partition("/")[0]
        if kind == "rejects":
            raise RetryTurn("no")
        if kind == "crashes":
            raise OSError("no browser")
        return obs(), True, {"reward": float(kind == "pays")}


def play(*kinds: str, **rollout: Any) -> Rollouts:
    tasks = [
        a_task(id=f"{kind}/{number}", images=[b"?"] if kind == "broken" else []) for number, kind in enumerate(kinds)
    ]
    loop = turn_loop(Strict, lambda request, turn: "a", **{"temperature": 0.0, "max_failed_fraction": 1.0} | rollout)
    return asyncio.run(Runner(loop, group_size=1).play(iter(tasks), len(tasks), "eval"))


def test_tasks_that_are_not_in_the_mean_are_counted_by_reason():
    rollouts = play("pays", "rejects", "fails", "crashes", "broken", "rejects", "pays")
    result = summarize_rollouts(rollouts, "eval", too_long=4)
    assert result.reward == pytest.approx(2 / 3)
    assert result.standard_error == pytest.approx(math.sqrt(1 / 9))
    assert result.left_out == LeftOut(too_long=4, bad_rows=1, rejected=2, failed=1)
    assert str(result.left_out) == "8 left out (4 prompt too long, 1 bad rows, 2 rejected with RetryTurn, 1 failed)"
    metrics = result.metrics()
    assert {name: metrics[name] for name in ("tasks", "tasks_left_out", "tasks_left_out/rejected", "reward/mean")} == {
        "tasks": 3.0,
        "tasks_left_out": 8.0,
        "tasks_left_out/rejected": 2.0,
        "reward/mean": pytest.approx(2 / 3),
    }


def test_greedy_replies_that_are_rejected_are_no_failure_of_the_run_and_are_not_sampled_again_in_vain():
    rollouts = play("pays", "rejects", "rejects", "rejects", max_failed_fraction=0.0, max_refills=5)
    assert sorted(t.id for t in rollouts.failed) == [f"eval/{number:05d}/00" for number in (1, 2, 3)]  # no refills
    assert summarize_rollouts(rollouts, "eval").left_out == LeftOut(rejected=3)


def test_replies_that_are_sampled_and_rejected_are_failures():
    with pytest.raises(RolloutError, match="RetryTurn 2 times: no"):
        play("pays", "rejects", temperature=1.0, max_failed_fraction=0.0)


def test_an_evaluation_without_any_reward_says_why():
    with pytest.raises(
        RolloutError, match=r"eval: there is no mean reward, .*2 left out \(2 rejected with RetryTurn\)"
    ):
        summarize_rollouts(play("rejects", "rejects"), "eval")
