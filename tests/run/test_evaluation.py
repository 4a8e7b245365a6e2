"""The result of an evaluation: the mean, its error, and the tasks that are not in it."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from testing.episodes import a_task, turn_loop

from vlmrl import Env, RetryTurn, obs
from vlmrl.config import Config, Data, Eval, EvalData, Part, Train
from vlmrl.data import TaskStream
from vlmrl.report.progress import RunProgress
from vlmrl.rollout.runner import RolloutError, Rollouts, Runner
from vlmrl.run import evaluate as evaluation_module
from vlmrl.run.evaluate import (
    Evaluation,
    Evaluator,
    LeftOut,
    TaskRewards,
    evaluate_run,
    require_held_out,
    summarize_rollouts,
)
from vlmrl.types import Task


class Strict(Env):
    """Rejects all responses to some tasks, crashes in others, and pays 1 or 0 in the rest."""

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
    assert [(task.id, task.rewards) for task in result.tasks] == [
        ("pays/0", [1.0]),
        ("fails/2", [0.0]),
        ("pays/6", [1.0]),
    ]
    assert len(result.failed) == 6  # the crash was played again twice
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
    ended = ("trajectories", "failed", "ending/env_done", "ending/error")
    assert [metrics[name] for name in ended] == [9.0, 6.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]


def test_greedy_responses_that_are_rejected_are_no_failure_of_the_run_and_are_not_sampled_again_in_vain():
    rollouts = play("pays", "rejects", "rejects", "rejects", max_failed_fraction=0.0, max_refills=5)
    assert sorted(t.id for t in rollouts.failed) == [f"eval/{number:05d}/00" for number in (1, 2, 3)]  # no refills
    assert summarize_rollouts(rollouts, "eval").left_out == LeftOut(rejected=3)


def test_responses_that_are_sampled_and_rejected_are_failures():
    with pytest.raises(RolloutError, match="RetryTurn 2 times: no"):
        play("pays", "rejects", temperature=1.0, max_failed_fraction=0.0)


def test_an_evaluation_without_any_reward_says_why():
    with pytest.raises(
        RolloutError, match=r"eval: there is no mean reward, .*2 left out \(2 rejected with RetryTurn\)"
    ):
        summarize_rollouts(play("rejects", "rejects"), "eval")


def test_pass_at_k_counts_rewards_from_the_threshold_on():
    tasks = [TaskRewards("a", "", [0.5, 1.0, 0.2, 0.0]), TaskRewards("b", "", [0.0] * 4)]
    rows = [Evaluation(tasks, solved, LeftOut(), []).metrics() for solved in (1.0, 0.5)]
    passed = [{name: value for name, value in row.items() if name.startswith("pass")} for row in rows]
    assert passed == [
        {"pass@1": 1 / 8, "pass@2": 1 / 4, "pass@4": 1 / 2},  # one of four is solved, then none
        {"pass@1": 1 / 4, "pass@2": pytest.approx(5 / 12), "pass@4": 1 / 2},  # 1 - C(2,2)/C(4,2) = 5/6
    ]


class Answered(Env):
    """Pays the task's answer, and crashes without one."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return obs(), True, {"reward": float(self.task.answer)}


class HeldOut(list[Task]):
    def limit_of(self, task: Task) -> int:
        return 100


async def no_images(urls: list[Any]) -> list[Any]:
    return []


@pytest.mark.parametrize(("first", "names"), [("0", ["same", "same#2"]), (None, ["same#2"]), ("too long", ["same#2"])])
def test_tasks_of_one_id_keep_their_names_where_one_of_them_is_left_out(first, names):
    """By these names the rewards of two models are compared, task by task."""
    tasks = HeldOut(a_task(id="same", answer=answer) for answer in (first, "1"))
    length: Any = SimpleNamespace(
        local=lambda task, limit=None: (200 if task.answer == "too long" else 20, []), download=no_images
    )
    loop = turn_loop(Answered, lambda request, turn: "a", max_failed_fraction=1.0, max_refills=0)
    run: Any = SimpleNamespace(
        config=Config(data=Data("rows.jsonl", held_out=2)),
        held_out=tasks,
        store=None,
        model=SimpleNamespace(new_store=lambda *_: None),
        runner=lambda **_: Runner(loop, group_size=1),
        stream=lambda tasks, **_: TaskStream(tasks, length, once=True),
    )
    result = asyncio.run(evaluate_run(run, RunProgress(Console(quiet=True)), label="eval"))
    assert [task.id for task in result.tasks] == names and result.tasks[-1].rewards == [1.0]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_stop_leaves_an_evaluation_overdue_unless_it_has_ended(monkeypatch, has_ended):
    """As the evaluation after step 2 of an asynchronous run, which has trained step 3 meanwhile."""
    monkeypatch.setattr(evaluation_module, "trajectory_log", lambda *_: None)
    config = Config(data=Data("rows.jsonl"), eval=Eval(every=2), train=Train(steps=4))
    evaluator = Evaluator(SimpleNamespace(config=config), None, None, {})  # type: ignore[arg-type]
    evaluator.evaluate = lambda step: asyncio.sleep(0 if has_ended else 1e6)  # type: ignore[method-assign, assignment]

    async def stop() -> None:
        evaluator.after_step(2)
        for _ in range(3):
            await asyncio.sleep(0)
        await evaluator.cancel()

    asyncio.run(stop())
    assert evaluator.is_due(3) is not has_ended and not evaluator.is_due(4)


def test_held_out_tasks_are_needed():
    with pytest.raises(ValueError, match=r"--data.held-out 64, or name others with --eval.data.path"):
        require_held_out(Config(data=Data("rows.jsonl")))
    part = Part(Data("rows.jsonl"))
    with pytest.raises(ValueError, match="in a mixture"):
        require_held_out(Config(mixture={"a": part}))
    require_held_out(Config(data=Data("rows.jsonl", held_out=8)))
    require_held_out(Config(eval=Eval(data=EvalData("rows.jsonl"))))
    require_held_out(Config(mixture={"a": part, "b": Part(Data("rows.jsonl"), eval_data=EvalData("rows.jsonl"))}))
