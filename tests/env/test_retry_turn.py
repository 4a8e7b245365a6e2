"""RetryTurn: a rejected response is part of a replay, and only ``step`` may reject one."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from typing import Any, ClassVar

import pytest
from testing.episodes import a_task, play, turn_loop

from vlmrl import Env, RetryTurn, obs
from vlmrl.rollout.runner import Runner

Step = tuple[dict[str, Any], bool, dict[str, Any]]


class Picky(Env):
    """Numbers the good responses. It rejects the first bad response of an episode; the first env crashes once, in turn 2."""

    built: ClassVar[list[Env]]

    def __init_subclass__(cls) -> None:
        cls.built = []

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.rejected = self.number = 0
        self.built.append(self)

    def step(self, response_text: str) -> Step:
        if response_text == "bad" and not self.rejected:
            self.rejected += 1
            raise RetryTurn("say it better")
        if self.turn == 2 and self is self.built[0]:
            raise RuntimeError("the browser crashed")
        self.number += 1
        return obs(f"number {self.number}"), self.turn == 3, {"reward": 1.0}


def shown(trajectory: Any) -> list[Any]:
    return [turn.messages[-1]["content"] for turn in trajectory.turns]


def test_a_replay_includes_the_response_that_the_env_rejected():
    class Env(Picky): ...

    responses = chain(["bad", "bad"], repeat("good"))
    trajectory = play(Env, lambda request, turn: next(responses))
    assert trajectory.ending == "env_done", trajectory.error
    assert [turn.text for turn in trajectory.turns] == ["bad", "good", "good", "good"]
    assert shown(trajectory) == ["2+2?", "number 1", "number 2", "number 3"]  # as if nothing had crashed
    assert [turn.metrics.get("turns_resampled") for turn in trajectory.turns] == [1.0, None, None, None]
    assert trajectory.reward == 4.0
    assert [(env.rejected, env.number) for env in Env.built] == [(1, 2), (1, 4)]
    assert trajectory.metrics["env_errors"] == 1.0


def test_a_response_may_be_rejected_right_after_a_replay():
    class Env(Picky): ...

    responses = chain(["good", "good", "bad"], repeat("good"))
    trajectory = play(Env, lambda request, turn: next(responses))
    assert [turn.text for turn in trajectory.turns] == ["good", "good", "good", "good"]
    assert shown(trajectory) == ["2+2?", "number 1", "number 2", "number 3"]


@pytest.mark.parametrize("first", [True, False])
def test_a_replay_that_rejects_other_responses_fails_the_trajectory(first: bool):
    """``first``: the first env rejects a response that the second accepts, or the other way round."""

    class Moody(Picky):
        def step(self, response_text: str) -> Step:
            if self.turn == 1 and self.rejected == 0 and (self is self.built[0]) == first:
                self.rejected += 1
                raise RetryTurn("not in the mood")
            return super().step(response_text)

    trajectory = play(Moody, lambda request, turn: "good")
    assert trajectory.ending == "error"
    assert "turn 1: RetryTurn was raised" in str(trajectory.error)
    assert "in the replay" in str(trajectory.error)


class Rejecting(Env):
    """Raises RetryTurn in the method ``where``, for the task t0 only."""

    def __init__(self, task: Any, where: str) -> None:
        super().__init__(task)
        self.where = where
        self.reject("__init__")

    def reject(self, method: str) -> None:
        if self.where == method and self.task.id == "t0":
            raise RetryTurn("once more")

    def reset(self) -> None:
        self.reject("reset")

    def step(self, response_text: str) -> Step:
        return obs(), True, {"reward": 1.0}

    def finish(self, ending: str) -> float | None:
        self.reject("finish")
        return None


class AsyncRejecting(Rejecting):
    async def reset(self) -> None:  # type: ignore[override]
        self.reject("reset")

    async def finish(self, ending: str) -> float | None:  # type: ignore[override]
        self.reject("finish")
        return None


@pytest.mark.parametrize("env", [Rejecting, AsyncRejecting])
@pytest.mark.parametrize("method", ["__init__", "reset", "finish"])
def test_retry_turn_outside_step_fails_the_trajectory_and_not_the_run(env: type[Env], method: str):
    tasks = (a_task(id=f"t{number}") for number in range(2))
    loop = turn_loop(env, lambda request, turn: "a", options={"where": method}, max_refills=0, max_failed_fraction=1.0)
    rollouts = asyncio.run(Runner(loop, group_size=2).play(tasks, 1, "x"))
    assert [[t.reward for t in group] for group in rollouts.groups] == [[1.0, 1.0]]  # of t1
    assert [t.task.id for t in rollouts.failed] == ["t0", "t0"]
    assert {t.error for t in rollouts.failed} == {
        f"env {env.__name__}, task t0: {method} raised RetryTurn (once more), which only step may raise: there is no response to "
        "sample again."
    }


def test_a_replay_whose_reset_raises_retry_turn_fails_the_trajectory():
    class Env(Picky):
        def reset(self) -> None:
            if self is not self.built[0]:
                raise RetryTurn("once more")

    trajectory = play(Env, lambda request, turn: "good")
    assert trajectory.ending == "error"
    assert "reset raised RetryTurn (once more)" in str(trajectory.error)
