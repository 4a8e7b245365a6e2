"""The session of one env: its thread, deadlines, retries and contract."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from testing.episodes import a_task, completion, play, script, turn_loop, wait_until

from vlmrl import Env, RetryTurn, Task, obs
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvContractError, EnvError, EnvSession
from vlmrl.types import Completion, PointSet

Step = tuple[dict[str, Any], bool, dict[str, Any]]


def new_session(env: Any, *, timeout: float = 600.0, max_retries: int = 1, **task: Any) -> EnvSession:
    return EnvSession(resolve_env(env), a_task(**task), max_turns=4, timeout=timeout, max_retries=max_retries)


def run(env: Any, responses: list[str], finish: str | None = None, **options: Any) -> tuple[EnvSession, list[Any]]:
    """Start, step through ``responses``, finish if an ending is given, close: the session and all that came back."""
    session = new_session(env, **options)

    async def go() -> list[Any]:
        try:
            results: list[Any] = [await session.start()]
            results += [await session.step(response) for response in responses]
            results += [] if finish is None else [await session.finish(finish, responses[-1])]
            return results
        finally:
            await session.close()

    return session, asyncio.run(go())


class Logged(Env):
    """Counts to ``self.turn``; writes every call into ``log``, which each test empties by subclassing."""

    log: list[Any]

    def __init_subclass__(cls) -> None:
        cls.log = []

    def reset(self) -> list[dict[str, Any]] | None:
        self.log.append("reset")
        return None

    def step(self, response_text: str) -> Step:
        self.log.append(f"step {self.turn} {response_text}")
        return obs(f"seen {response_text}"), False, {"reward": 0.5, "words": 2, "note": "text"}

    def finish(self, ending: str) -> float | None:
        self.log.append(f"finish {ending} {self.last_response}")
        return 1.0

    def close(self) -> None:
        self.log.append("close")


def test_an_episode_calls_each_method_in_order_and_closes_once():
    class Plain(Logged):
        pass

    session, (start, first, second, final) = run(Plain, ["a", "b"], finish="max_turns")
    assert Plain.log == ["reset", "step 0 a", "step 1 b", "finish max_turns b", "close"]
    assert start is None
    assert first.messages == [{"role": "user", "content": "seen a"}]
    assert (first.done, first.reward, first.metrics) == (False, 0.5, {"words": 2.0})
    assert second.messages == [{"role": "user", "content": "seen b"}]
    assert final == 1.0
    assert session.counts == {}


def test_the_loop_sets_turn_limit_and_seed():
    class Curious(Logged):
        def step(self, response_text: str) -> Step:
            return obs(), True, {"found": self.turn * 1000 + self.max_turns * 100 + self.seed}

    _, (_, first, second) = run(Curious, ["a", "b"], seed=7)
    assert (first.metrics, second.metrics) == ({"found": 407.0}, {"found": 1407.0})


def test_async_methods_are_awaited():
    class Async(Logged):
        async def reset(self) -> list[dict[str, Any]]:  # type: ignore[override]
            await asyncio.sleep(0)
            return [{"role": "user", "content": "async"}]

        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            await asyncio.sleep(0)
            return obs(response_text), False, {"envs_loop": threading.current_thread().name == "vlmrl-envs"}

        async def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            return {"role": "tool", "content": observation["obs_str"]}

        async def finish(self, ending: str) -> float:  # type: ignore[override]
            return 2.0

        async def close(self) -> None:  # type: ignore[override]
            self.log.append("closed")

    _, (start, first, final) = run(Async, ["a"], finish="env_done")
    assert start == [{"role": "user", "content": "async"}]
    assert first.messages == [{"role": "tool", "content": "a"}]
    assert first.metrics == {"envs_loop": 1.0}
    assert final == 2.0
    assert Async.log == ["closed"]


def test_all_plain_methods_of_one_env_run_in_one_thread_of_its_own():
    class Database(Logged):
        def __init__(self, task: Task) -> None:
            self.threads = [threading.current_thread()]
            self.database = sqlite3.connect(":memory:")  # refuses to be used in another thread
            self.database.execute("create table responses (text)")

        def reset(self) -> None:
            self.threads.append(threading.current_thread())

        def step(self, response_text: str) -> Step:
            self.threads.append(threading.current_thread())
            self.database.execute("insert into responses values (?)", (response_text,))
            return obs(), False, {"rows": self.database.execute("select count(*) from responses").fetchone()[0]}

        def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
            self.threads.append(threading.current_thread())
            return super().format_observation(observation)  # type: ignore[return-value]

        def close(self) -> None:
            self.database.close()
            self.log.append({*self.threads, threading.current_thread()})

    async def both() -> None:
        sessions = [new_session(Database), new_session(Database)]
        await asyncio.gather(*(session.start() for session in sessions))
        for response in ("a", "b"):
            results = await asyncio.gather(*(session.step(response) for session in sessions))
        assert [result.metrics for result in results] == [{"rows": 2.0}, {"rows": 2.0}]
        await asyncio.gather(*(session.close() for session in sessions))
        assert [session.counts for session in sessions] == [{}, {}]

    asyncio.run(both())
    first, second = Database.log
    assert len(first) == len(second) == 1
    assert first != second
    assert threading.main_thread() not in first | second
    assert all(thread.daemon for thread in first | second)


def test_a_hung_step_fails_its_trajectory_and_is_counted():
    class Hangs(Logged):
        def step(self, response_text: str) -> Step:
            if self.task.id == "bad":
                time.sleep(3600)
            return obs("fine"), True, {"reward": 1.0}

    bad = play(Hangs, ["a"], a_task(id="bad"), env_timeout=2.0, max_env_retries_per_turn=1)
    assert bad.ending == "error"
    assert bad.error is not None
    assert "Hangs, task bad, turn 0: timed out after 2 s" in bad.error
    assert (bad.metrics["env_timeouts"], bad.metrics["env_retries"]) == (2.0, 1.0)
    assert bad.reward is None
    assert play(Hangs, ["a"], a_task(id="good")).reward == 2.0  # of step and finish


async def test_an_async_step_that_ignores_its_cancellation_times_out_too():
    class Ignores(Logged):
        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.to_thread(goes_on.wait)
            raise AssertionError

    goes_on = threading.Event()
    session = new_session(Ignores, timeout=0.1, max_retries=0)
    with pytest.raises(EnvError, match=r"timed out after 0\.1 s"):
        await started(session, lambda: session.step("a"))
    assert session.counts == {"timeouts": 1}
    goes_on.set()


def test_a_timeout_error_of_the_env_keeps_its_message():
    class Socket(Logged):
        def step(self, response_text: str) -> Step:
            raise TimeoutError("the search server")

    session = new_session(Socket, max_retries=0)
    with pytest.raises(EnvError, match="TimeoutError: the search server"):
        asyncio.run(started(session, lambda: session.step("a")))
    assert session.counts == {"errors": 1}


async def started(session: EnvSession, act: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        await session.start()
        return await act()
    finally:
        await session.close()


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from testing.episodes import play
from vlmrl import Env

class Hangs(Env):
    def step(self, response_text):
        time.sleep(3600)

trajectory = play(Hangs, ["a"], env_timeout=0.2, max_env_retries_per_turn=0)
print(trajectory.ending, trajectory.metrics["env_timeouts"], time.time(), flush=True)
"""


@pytest.mark.slow
def test_hung_envs_do_not_keep_the_process_alive():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    ended = time.time()
    ending, timeouts, last = done.stdout.split()
    assert (ending, timeouts) == ("error", "1.0")
    assert ended - float(last) < 600  # the env hangs for ever


def test_after_an_error_a_new_env_replays_the_turns():
    class Flaky(Logged):
        made = 0

        def __init__(self, task: Task) -> None:
            type(self).made += 1
            self.number = self.made

        def step(self, response_text: str) -> Step:
            super().step(response_text)
            if response_text == "b" and self.number == 1:
                raise ConnectionError("lost")
            return obs(f"{response_text} at {self.turn}", images=[Image.new("RGB", (2, 2), "red")]), False, {}

        def close(self) -> None:
            self.log.append(f"close {self.number}")

    session, (_, first, second, final) = run(Flaky, ["a", "b"], finish="max_turns")
    log = [entry for entry in Flaky.log if entry != "close 1"]
    assert log == ["reset", "step 0 a", "step 1 b", "reset", "step 0 a", "step 1 b", "finish max_turns b", "close 2"]
    wait_until(lambda: Flaky.log.count("close 1") == 1)
    assert first.messages[0]["content"][1]["text"] == "a at 0"
    assert second.messages[0]["content"][1]["text"] == "b at 1"
    assert final == 1.0
    assert session.counts == {"errors": 1, "retries": 1}


def test_of_a_long_error_the_beginning_and_the_end_are_kept():
    class Quoting(Env):
        def step(self, response: str) -> Any:
            raise RuntimeError("The server sent " + "a" * 10**6 + ", which is no answer.")

    error = play(Quoting, ["a"]).error
    assert len(error) < 11_000 and "The server sent a" in error and "a, which is no answer." in error


@pytest.mark.parametrize("method", ["__init__", "reset", "finish"])
def test_an_error_anywhere_is_retried(method: str):
    class Flaky(Logged):
        failed = False

    def flaky(self: Any, *args: Any) -> None:
        if not Flaky.failed:
            Flaky.failed = True
            raise OSError("once")

    setattr(Flaky, method, flaky)
    session, _ = run(Flaky, ["a"], finish="env_done")
    assert Flaky.failed
    assert session.counts == {"errors": 1, "retries": 1}


def test_retries_end_and_the_error_names_env_task_and_turn():
    class Broken(Logged):
        def step(self, response_text: str) -> Step:
            self.log.append("step")
            raise KeyError("gone")

    session = new_session(Broken, max_retries=2, id="train/3")
    with pytest.raises(EnvError, match=r"Broken, task train/3, turn 0: KeyError: 'gone'"):
        asyncio.run(started(session, lambda: session.step("a")))
    assert session.counts == {"errors": 3, "retries": 2}
    assert Broken.log.count("step") == 3


class UnprintableExit(SystemExit):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "error", [StopIteration("end"), SystemExit(2), asyncio.CancelledError(), CancelledError(), UnprintableExit()]
)
def test_cancellation_errors_of_an_env_are_env_errors(error: BaseException):
    class Odd(Logged):
        def step(self, response_text: str) -> Step:
            raise error

    trajectory = play(Odd, ["a"], max_env_retries_per_turn=0)
    assert trajectory.ending == "error"
    assert trajectory.error is not None
    assert type(error).__name__ in trajectory.error
    assert trajectory.metrics["env_errors"] == 1.0


@pytest.mark.parametrize("shown", ["text", "image", "reset", "reward"])
def test_a_replay_with_another_observation_is_an_error(shown: str):
    class Drifts(Logged):
        count: Iterator[int] = iter(range(100))

        def __init__(self, task: Task) -> None:
            self.number = next(self.count)
            self.say = {kind: self.number if kind == shown else 0 for kind in ("text", "image", "reset", "reward")}

        def reset(self) -> list[dict[str, Any]]:
            return [{"role": "user", "content": f"start {self.say['reset']}"}]

        def step(self, response_text: str) -> Step:
            if response_text == "b":
                raise ConnectionError("lost")
            image = Image.new("RGB", (2, 2), (self.say["image"], 0, 0))
            return obs(f"text {self.say['text']}", images=[image]), False, {"reward": self.say["reward"]}

    session = new_session(Drifts, max_retries=5)

    async def two_turns() -> None:
        await session.step("a")
        await session.step("b")

    with pytest.raises(EnvError, match="in the replay"):
        asyncio.run(started(session, two_turns))
    assert session.counts == {"errors": 1, "retries": 1}


def test_an_env_that_cannot_be_replayed_fails_at_once():
    class Live(Logged):
        replayable = False

        def step(self, response_text: str) -> Step:
            self.log.append("step")
            raise ConnectionError("lost")

    session = new_session(Live, max_retries=5)
    with pytest.raises(EnvError, match="ConnectionError: lost"):
        asyncio.run(started(session, lambda: session.step("a")))
    assert Live.log.count("step") == 1
    assert session.counts == {"errors": 1}


def test_retry_turn_samples_with_another_seed_and_discards_the_first_response():
    class Picky(Logged):
        def step(self, response_text: str) -> Step:
            self.log.append(f"step {self.turn}")
            if response_text == "no call":
                raise RetryTurn("no call in it")
            return obs("next"), False, {"reward": 1.0}

    seeds: list[int] = []
    prompts: list[list[int]] = []

    def response(request: Any, turn: int) -> str:
        seeds.append(request.sampling.seed)
        prompts.append(list(request.prompt_ids))
        return ["call", "no call", "call"][turn]

    trajectory = play(Picky, response, max_turns=2, max_env_retries_per_turn=1)
    assert [turn.text for turn in trajectory.turns] == ["call", "call"]
    assert trajectory.ending == "max_turns"
    assert trajectory.reward == 3.0  # 1 for each turn, and 1 from finish
    assert len({*seeds}) == 3
    assert prompts[1] == prompts[2]
    assert [turn.metrics.get("turns_resampled") for turn in trajectory.turns] == [None, 1.0]
    assert Picky.log[:4] == ["reset", "step 0", "step 1", "step 1"]
    assert "env_errors" not in trajectory.metrics


def test_retry_turn_is_bounded():
    class Never(Logged):
        def step(self, response_text: str) -> Step:
            self.log.append("step")
            raise RetryTurn("not this one")

    trajectory = play(Never, lambda request, turn: f"try {turn}", max_env_retries_per_turn=2)
    assert trajectory.ending == "error"
    assert trajectory.error is not None
    assert "RetryTurn 3 times: not this one" in trajectory.error
    assert Never.log == ["reset", "step", "step", "step", "close"]
    assert trajectory.turns == []


@pytest.mark.parametrize("reward", ["much", None])
def test_a_reward_is_a_number(reward: Any):
    class Wrong(Logged):
        def step(self, response_text: str) -> Step:
            return obs(), True, {"reward": reward if reward is not None else [1.0]}

    with pytest.raises(EnvContractError, match=r"Wrong: info\['reward'\] must be a finite number"):
        play(Wrong, ["a"])


@pytest.mark.parametrize("response", ["nan", "inf", "1e999"])
@pytest.mark.parametrize("name", ["reward", "guess"])
def test_a_response_that_makes_a_number_infinite_fails_its_episode_and_not_the_run(response: str, name: str):
    class Numeric(Logged):
        def step(self, response_text: str) -> Step:
            return obs(), True, {"reward": 1.0} | {name: float(response_text.removesuffix("<|im_end|>"))}

    trajectory = play(Numeric, [response])
    assert trajectory.ending == "error" and trajectory.error is not None
    assert f"Numeric: info['{name}'] must be a finite number, but it is" in trajectory.error
    assert trajectory.error.endswith(", in step).") and Numeric.log[-1] == "close"


def test_a_final_reward_is_a_finite_number():
    class Wrong(Logged):
        def finish(self, ending: str) -> float:
            return float("nan")

    trajectory = play(Wrong, ["a"], max_turns=1)
    assert trajectory.error is not None and "Wrong: finish must be a finite number, but it is nan" in trajectory.error
    assert Wrong.log[-1] == "close"


@pytest.mark.parametrize("method", ["reset", "format_observation"])
@pytest.mark.parametrize("value", ["text", [{"content": "no role"}], 7])
def test_malformed_messages_stop_the_run(method: str, value: Any):
    class Wrong(Logged):
        pass

    setattr(Wrong, method, lambda self, *args: value)
    with pytest.raises(EnvContractError, match=f"Wrong: {method} must return messages"):
        play(Wrong, ["a", "b"])
    assert Wrong.log[-1] == "close"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fails", ["reset", "step", "finish"])
def test_every_env_is_closed_once(fails: str, is_async: bool):
    class Made(Logged):
        envs: ClassVar[list[Any]] = []
        closed = threading.Semaphore(0)

        def __init__(self, task: Task) -> None:
            self.envs.append(self)
            self.closes = 0

        def shut(self) -> None:
            self.closes += 1
            self.closed.release()

        close = shut

    if is_async:

        async def close(self: Any) -> None:
            self.shut()

        Made.close = close  # type: ignore[assignment,method-assign]

    def fail(self: Any, *args: Any) -> Any:
        raise OSError("broken")

    setattr(Made, fails, fail)
    trajectory = play(Made, ["a"], max_turns=1, max_env_retries_per_turn=2)
    assert trajectory.ending == "error"
    for _ in range(3):
        assert Made.closed.acquire(timeout=600)
    assert [env.closes for env in Made.envs] == [1, 1, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_env_whose_constructor_ends_after_its_deadline_is_closed_and_the_next_one_only_once(is_async: bool):
    go_on, closed = threading.Event(), []

    class Late(Logged):
        def __init__(self, task: Task) -> None:
            self.number = len(self.log)
            self.log.append("init")
            if self.number == 0:
                go_on.wait(600)

        def shut(self) -> None:
            closed.append(self.number)

        close = shut

    if is_async:

        async def close(self: Any) -> None:
            self.shut()

        Late.close = close  # type: ignore[assignment,method-assign]

    trajectory = play(Late, ["a"], max_turns=1, env_timeout=3.0)
    assert (trajectory.ending, trajectory.metrics["env_timeouts"]) == ("max_turns", 1.0)
    go_on.set()
    wait_until(lambda: sorted(closed) == [0, 1])


def test_an_async_close_is_called_but_not_awaited_when_the_run_stops():
    class Open(Logged):
        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            self.log.append("step")
            await asyncio.sleep(3600)
            raise AssertionError

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.to_thread(gate.wait)
            self.log.append("closed")
            closed.set()

    gate, closed = threading.Event(), threading.Event()

    async def go() -> None:
        loop = turn_loop(Open, ["a"])
        playing = asyncio.create_task(loop.play(a_task(), "g", "g/00"))
        while "step" not in Open.log:
            await asyncio.sleep(0.001)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert Open.log[-1] == "step"
        gate.set()
        assert await asyncio.to_thread(closed.wait, 600)

    asyncio.run(go())
    assert Open.log[-1] == "closed"


def test_an_error_in_close_does_not_fail_the_trajectory():
    class Stuck(Logged):
        def close(self) -> None:
            raise OSError("stuck")

    trajectory = play(Stuck, ["a"], max_turns=1)
    assert (trajectory.ending, trajectory.reward) == ("max_turns", 1.5)
    assert trajectory.metrics["env_close_errors"] == 1.0


def test_an_env_is_closed_even_if_the_session_is_cancelled_twice():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Logged):
        def step(self, response_text: str) -> Step:
            begun.set()
            go_on.wait(600)
            return obs(), True, {}

    async def go() -> None:
        session = new_session(Slow)
        playing = asyncio.create_task(started(session, lambda: session.step("a")))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        playing.cancel()
        await asyncio.sleep(0.01)  # now it waits for close, which waits for the step
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert "close" not in Slow.log
        go_on.set()
        while "close" not in Slow.log:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(go(), 600))
    assert Slow.log == ["reset", "close"]


def too_long(request: Any, turn: int) -> str:
    return "a" * 300


def aborted(request: Any, turn: int) -> Completion:
    return completion("a", len(request.prompt_ids), "abort")


class Finishes(Logged):
    def step(self, response_text: str) -> Step:
        if response_text == "fail":
            raise OSError("broken")
        return obs("more " * 20), response_text == "done", {"reward": 0.0}


@pytest.mark.parametrize(
    ("responses", "limits", "ending", "finished"),
    [
        (["done"], {}, "env_done", ["finish env_done done"]),
        (["a", "b"], {"max_turns": 2}, "max_turns", ["finish max_turns b"]),
        (too_long, {"max_response_tokens": 5}, "length", ["finish length aaaaa"]),
        (["a", "b"], {"max_tokens": 60, "max_response_tokens": 30}, "max_tokens", ["finish max_tokens a"]),
        (["a", "fail"], {}, "error", []),
        (aborted, {}, "aborted", []),
    ],
)
def test_finish_is_called_once_at_every_ending_that_is_not_a_failure(
    responses: Any, limits: dict[str, Any], ending: str, finished: list[str]
):
    Finishes.log.clear()
    trajectory = play(Finishes, script(responses), **limits)
    assert trajectory.ending == ending
    assert [entry for entry in Finishes.log if entry.startswith("finish")] == finished
    assert trajectory.final_reward == (1.0 if finished else None)
    wait_until(lambda: Finishes.log.count("close") == Finishes.log.count("reset"))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("method", ["reset", "step", "finish", "close"])
def test_what_a_coroutine_raises_is_an_env_error_and_ends_no_run(method: str, error: BaseException):
    class Raises(Logged):
        async def reset(self) -> None:  # type: ignore[override]
            self.act("reset")

        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            self.act("step")
            return obs(), True, {"reward": 1.0}

        async def finish(self, ending: str) -> None:  # type: ignore[override]
            self.act("finish")

        async def close(self) -> None:  # type: ignore[override]
            self.act("close")

        def act(self, name: str) -> None:
            if name == method:
                raise error

    trajectory = play(Raises, ["a"], max_env_retries_per_turn=0)
    if method == "close":
        assert (trajectory.reward, trajectory.metrics["env_close_errors"]) == (1.0, 1.0)
    else:
        assert trajectory.ending == "error"
        assert type(error).__name__ in str(trajectory.error)


def test_an_observation_that_cannot_be_rendered_is_an_env_error():
    class Odd(Logged):
        def format_observation(self, observation: Any) -> Any:
            return {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}

    trajectory = play(Odd, ["a", "b"], max_turns=2)
    assert trajectory.ending == "error"
    assert str(trajectory.error).startswith("task t, turn 1: the env's messages cannot be rendered: ValueError")


class Pointing(Env):
    def step(self, response_text):
        return obs("on"), False, {"reward": 1.0, "points": json.loads(response_text), "clicks": 1}


def test_points_are_part_of_the_turn_and_no_metric():
    response = '[{"label": "click", "at": [[0.5, 1]]}]'
    trajectory = play(Pointing, [response, "[]"], max_turns=2)
    assert trajectory.reward == 2.0
    assert trajectory.turns[0].points == [PointSet("click", ((0.5, 1.0),))]
    assert trajectory.turns[0].metrics == {"clicks": 1.0} and trajectory.turns[1].points == []


@pytest.mark.parametrize(
    "wrong",
    [
        "1",
        "[1]",
        '[{"label": "a"}]',
        '[{"label": "a", "at": []}]',  # nothing to draw
        '[{"label": "a", "at": [[2, 0]]}]',
        '[{"label": "a", "at": [[1]]}]',
    ],
)
def test_wrong_points_stop_the_run(wrong):
    with pytest.raises(EnvContractError, match=r"info\['points'\] must be a list such as"):
        play(Pointing, [wrong])


def burn(seconds: float) -> None:
    """Compute until this thread has used ``seconds`` of a core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_an_envs_cpu_seconds_are_what_it_computed_and_not_what_it_waited():
    class Computes(Env):
        def step(self, response_text: str) -> Step:
            burn(0.05)
            return obs("x"), True, {"reward": 1}

    class Waits(Env):
        def step(self, response_text: str) -> Step:
            other = threading.Thread(target=burn, args=(1.0,))  # another episode has the core
            other.start()
            other.join()
            return obs("x"), True, {"reward": 1}

    computes, _ = run(Computes, ["a"])
    assert 0.05 <= computes.cpu_seconds < computes.seconds + 0.05
    waits, _ = run(Waits, ["a"])
    assert waits.seconds >= 1.0 and waits.cpu_seconds < 0.5


def test_what_is_computed_after_an_async_step_in_the_envs_thread_counts():
    class Formats(Env):
        async def step(self, response_text: str) -> Step:  # type: ignore[override]
            return obs("x"), False, {"reward": 1}

        def format_observation(self, observation: dict[str, Any]) -> Any:
            burn(0.05)
            return super().format_observation(observation)

    assert run(Formats, ["a"])[0].cpu_seconds >= 0.05


@pytest.mark.parametrize("on_instance", [False, True])
def test_an_env_with_its_own_formatter_may_return_any_dict_and_numpys_or_no_done(on_instance):
    def shown(observation: dict[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": observation["text"]}

    class Own(Env):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            if on_instance:
                self.format_observation = shown  # type: ignore[assignment,method-assign]

        def step(self, response_text: str) -> Any:
            return (
                {"text": response_text},
                {"a": np.bool_(False), "b": 0, "c": None, "d": np.int64(1)}[response_text],
                {},
            )

        if not on_instance:
            format_observation = staticmethod(shown)  # type: ignore[assignment]

    _, [_, *results] = run(Own, ["a", "b", "c", "d"])
    assert [result.done for result in results] == [False, False, False, True]
    assert [result.messages for result in results[:3]] == [[{"role": "user", "content": text}] for text in "abc"]
