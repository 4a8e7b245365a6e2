"""Many groups at once: ids and order, refills, the failures that stop a run, and work that is done once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image, ImageDraw
from testing.episodes import COLORS, a_task, image, script, sharp_model, turn_loop

from vlmrl import Env, Task, Trajectory, obs
from vlmrl.config import Rollout
from vlmrl.engine.base import Request
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.env.base import resolve_env
from vlmrl.env.session import EnvContractError
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel
from vlmrl.rollout.runner import RolloutError, Rollouts, Runner
from vlmrl.rollout.turn_loop import TurnLoop

Step = tuple[dict[str, Any], bool, dict[str, Any]]
LIMIT = 600.0  # seconds, for a machine that is ten times too slow


class Once(Env):
    def step(self, response_text: str) -> Step:
        return obs(), True, {"reward": 1.0}


def tasks(count: int | None = None) -> Iterator[Task]:
    numbers = itertools.count() if count is None else range(count)
    return (a_task(f"Task {number}", id=f"train/{number}", seed=number) for number in numbers)


def runner(env: Any = Once, response: Any = lambda request, turn: "a", group_size: int = 2, **rollout: Any) -> Runner:
    return Runner(turn_loop(env, response, **rollout), group_size=group_size)


def play(runner: Runner, source: Iterator[Task], count: int, **options: Any) -> Rollouts:
    return asyncio.run(runner.play(source, count, "step1", **options))


class Taking(Env):
    """Takes the cards off its task, one a turn; the first card pays."""

    def step(self, response_text: str) -> Step:
        card = self.task.data["cards"].pop()
        self.task.prompt[0]["content"] = "changed"
        return obs(f"A {card}."), self.turn == 1, {"reward": float(card == "king" and self.turn == 0)}


def test_what_one_member_does_to_its_task_no_other_sees():
    task = a_task("Draw.", [image("red")], data={"cards": ["ten", "queen", "king"]})
    (group,) = play(runner(Taking, group_size=4), iter([task]), 1).groups
    assert [trajectory.reward for trajectory in group] == [1.0] * 4
    assert task.data["cards"] == ["ten", "queen", "king"]
    assert task.prompt == a_task("Draw.", task.images).prompt


def failing(*ids: str, once: bool = False) -> type[Env]:
    """An env that fails in the trajectories of the tasks ``ids``; with ``once``, only in the first of each."""
    failed: list[str] = []

    class Fails(Once):
        replayable = False

        def step(self, response_text: str) -> Step:
            if self.task.id in ids and not (once and self.task.id in failed):
                failed.append(self.task.id)
                raise OSError(f"no luck with {self.task.id}")
            return super().step(response_text)

    return Fails


class Marks(Env):
    """Draws on its task's image, and shows it."""

    def __init__(self, task: Task) -> None:
        self.image = task.images[0]

    def step(self, response_text: str) -> Step:
        ImageDraw.Draw(self.image).rectangle((8 * self.turn, 0, 8 * self.turn + 4, 4), fill="white")
        return obs(images=[self.image]), self.turn == 2, {"reward": 1.0}


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_one_member_draws_on_the_image_of_its_task_no_other_sees(kind: str, tmp_path: Path):
    image("blue").save(tmp_path / "a.png")
    shown = image("blue") if kind == "memory" else Image.open(tmp_path / "a.png")
    loop = turn_loop(Marks, lambda request, turn: "mark", max_concurrent=1)
    (group,) = asyncio.run(Runner(loop, group_size=3).play(iter([a_task(images=[shown])]), 1, "g")).groups
    seen = [[item.id for turn in each.turns for item in turn.media] for each in group]
    assert seen[0] == seen[1] == seen[2] and len(set(seen[0])) == 3


def test_groups_come_in_task_order_with_ids_that_sort_likewise():
    ended: list[Trajectory] = []
    others_ended = asyncio.Event()

    async def first_group_last(request: Request, turn: int) -> str:
        if "/00000/" in request.trajectory_id:
            await others_ended.wait()
        return "a"

    def on_end(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if len(ended) == 4:
            others_ended.set()

    rollouts = play(runner(response=first_group_last), tasks(), 3, on_end=on_end)
    assert [[t.id for t in group] for group in rollouts.groups] == [
        ["step1/00000/00", "step1/00000/01"],
        ["step1/00001/00", "step1/00001/01"],
        ["step1/00002/00", "step1/00002/01"],
    ]
    assert [[t.group_id for t in group] for group in rollouts.groups] == [[f"step1/{i:05d}"] * 2 for i in range(3)]
    assert [[t.task.id for t in group] for group in rollouts.groups] == [[f"train/{i}"] * 2 for i in range(3)]
    assert [t.id for t in rollouts.trajectories] == sorted(t.id for t in ended)
    assert (rollouts.failed, rollouts.dropped_groups) == ([], 0)


def test_only_as_many_tasks_are_drawn_as_are_played():
    source = tasks()
    play(runner(), source, 3)
    assert next(source).id == "train/3"


def test_fewer_groups_come_only_where_the_tasks_run_out():
    rollouts = play(runner(), tasks(2), 5)
    assert [group[0].task.id for group in rollouts.groups] == ["train/0", "train/1"]


def test_no_more_trajectories_than_allowed_are_in_play_at_once():
    playing, most = 0, 0

    class Counted(Once):
        def __init__(self, task: Task) -> None:
            nonlocal playing, most
            playing += 1
            most = max(most, playing)

        def close(self) -> None:
            nonlocal playing
            playing -= 1

    three_play = asyncio.Event()

    async def response(request: Request, turn: int) -> str:
        if playing == 3:
            three_play.set()
        await three_play.wait()
        return "a"

    rollouts = play(runner(Counted, response, group_size=4, max_concurrent=3), tasks(), 4)
    assert len(rollouts.trajectories) == 16
    assert (playing, most) == (0, 3)


def test_a_failed_member_is_refilled_under_an_id_and_seed_of_its_own():
    seeds: dict[str, int] = {}

    def response(request: Request, turn: int) -> str:
        seeds[request.trajectory_id] = request.sampling.seed
        return "a"

    rollouts = play(runner(failing("train/1", once=True), response), tasks(), 3)
    (failed,) = rollouts.failed
    assert failed.error is not None
    assert "no luck with train/1" in failed.error
    first, second = rollouts.groups[1]
    assert sorted([first.id, second.id]) != ["step1/00001/00", "step1/00001/01"]
    assert f"{failed.id}.1" in (first.id, second.id)
    assert seeds[failed.id] != seeds[f"{failed.id}.1"]
    assert [len(group) for group in rollouts.groups] == [2, 2, 2]
    assert all(t.reward == 1.0 for t in rollouts.trajectories)
    assert rollouts.dropped_groups == 0


@pytest.mark.parametrize("non_retryable", [{"images": [b"no image"]}, {"text": "word " * 2000}])
def test_a_task_that_cannot_be_played_is_not_refilled(non_retryable: dict[str, Any]):
    some = [a_task(id="bad", **non_retryable), *(a_task(id=f"train/{index}") for index in range(3))]
    rollouts = play(runner(max_refills=5, max_failed_fraction=1.0), iter(some), 3)
    assert [t.task.id for t in rollouts.failed] == ["bad", "bad"]
    assert all(t.non_retryable for t in rollouts.failed)
    assert (len(rollouts.groups), rollouts.dropped_groups) == (3, 1)


def test_another_task_replaces_a_group_that_stays_incomplete():
    rollouts = play(runner(failing("train/1"), max_refills=1, max_failed_fraction=1.0), tasks(), 3)
    assert [group[0].task.id for group in rollouts.groups] == ["train/0", "train/2", "train/3"]
    assert [len(group) for group in rollouts.groups] == [2, 2, 2]
    assert rollouts.dropped_groups == 1
    assert sorted(t.id for t in rollouts.failed) == [f"step1/00001/{member}" for member in ("00", "00.1", "01", "01.1")]
    assert {t.id: t.retried for t in rollouts.failed} == {t.id: not t.id.endswith(".1") for t in rollouts.failed}
    assert not any(t.failed for t in rollouts.trajectories)


def test_too_many_failures_stop_the_run_with_the_commonest_reasons():
    broken = [f"train/{number}" for number in range(4)]
    with pytest.raises(RolloutError) as raised:
        play(runner(failing(*broken), max_refills=0, max_failed_fraction=0.25), tasks(), 8)
    summary, reason = str(raised.value).splitlines()
    assert re.fullmatch(
        r"[5-8] trajectories failed where 16 were requested, more than rollout.max_failed_fraction \(0.25\) allows:",
        summary,
    )
    assert re.fullmatch(
        r"  [5-8] failures of one kind, such as: env .*Fails, task (.*), turn 0: OSError: no luck with \1 \(.*, in step\)",
        reason,
    )
    assert str(len(raised.value.failed)) == summary.split()[0]


def test_failures_up_to_the_line_do_not_stop_the_run():
    rollouts = play(runner(failing("train/0", "train/1"), max_refills=0, max_failed_fraction=0.25), tasks(), 8)
    assert (len(rollouts.groups), len(rollouts.failed), rollouts.dropped_groups) == (8, 4, 2)


def test_envs_that_always_fail_end_the_run(caplog: pytest.LogCaptureFixture):
    class Broken(Once):
        def step(self, response_text: str) -> Step:
            raise OSError("always")

    gc.collect()  # what other tests left
    caplog.clear()
    with pytest.raises(RolloutError, match=r"[56] trajectories failed where 4 were requested"):
        play(runner(Broken, max_failed_fraction=1.0), tasks(), 2)
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []  # asyncio logs errors that were never retrieved


def test_env_steps_of_many_trajectories_overlap():
    barrier = threading.Barrier(64, timeout=LIMIT)

    class Waits(Env):
        def step(self, response_text: str) -> Step:
            barrier.wait()  # raises unless all 64 steps run at the same time
            return obs("next"), False, {"reward": 1.0}

    rollouts = play(runner(Waits, group_size=8, max_turns=2, env_timeout=LIMIT), tasks(), 8)
    assert [len(t.turns) for t in rollouts.trajectories] == [2] * 64


class Gallery(Env):
    """Shows one more image each turn, chosen by the task's seed. Each member gets image objects of its own."""

    def step(self, response_text: str) -> Step:
        time.sleep(random.random() / 500)
        color = COLORS[(self.seed + self.turn + 1) % len(COLORS)]
        return (
            obs("Next:", images=[image(color, (32 * (self.turn + 2), 32 + 32 * self.seed))]),
            False,
            {"reward": 1.0},
        )


def gallery(count: int) -> Iterator[Task]:
    return (
        a_task("First:", [image(COLORS[seed], (32, 32 + 32 * seed))], id=f"train/{seed}", seed=seed)
        for seed in range(count)
    )


def test_each_distinct_image_is_processed_once():
    many = runner(Gallery, group_size=8, max_turns=8)
    rollouts = play(many, gallery(2), 2)
    store = many.loop.store
    assert store is not None
    shown = [[[item.id for item in turn.media] for turn in t.turns] for group in rollouts.groups for t in group]
    assert all(len(turns) == 8 and all(len(media) == 1 for media in turns) for turns in shown)
    assert shown[:8] == [shown[0]] * 8
    assert shown[8:] == [shown[8]] * 8
    distinct = {media[0] for turns in shown for media in turns}
    assert len(distinct) == 16
    assert store.seen == 2 * 8 * 8
    assert store.processed / len(distinct) == 1.00
    items = [[turn.media[0] for turn in t.turns] for t in rollouts.groups[0]]
    assert all(mine is first for member in items for mine, first in zip(member, items[0], strict=True))


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_error_in_one_trajectory_stops_the_rest(lockstep: bool):
    released: list[str] = []
    closed: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Breaks(Env):
        def step(self, response_text: str) -> Any:
            return "no tuple"

        def close(self) -> None:
            closed.put(self.task.id)

    requests: list[str] = []
    all_requested = asyncio.Event()

    async def response(request: Request, turn: int) -> str:
        requests.append(request.trajectory_id)
        if len(requests) == 8:
            all_requested.set()
        await (all_requested if request.trajectory_id == "step1/00001/01" else asyncio.Event()).wait()
        return "a"

    engine = script(lambda request, turn: response(request, turn))
    release, engine.release = engine.release, lambda name: (released.append(name), release(name))[1]  # type: ignore[method-assign,func-returns-value]
    if lockstep:
        engine = LockstepBatching(script(lambda request, turn: "a"))  # type: ignore[assignment]

    async def go() -> None:
        before = asyncio.all_tasks()
        with pytest.raises(EnvContractError, match="step must return"):
            await runner(Breaks, engine).play(tasks(), 4, "step1")
        assert asyncio.all_tasks() <= before | {asyncio.current_task()}

    asyncio.run(asyncio.wait_for(go(), LIMIT))
    names = sorted(closed.get(timeout=LIMIT) for _ in range(8))  # a close waits for its env's last call
    assert names == [f"train/{number}" for number in range(4) for _ in range(2)]
    if not lockstep:
        assert len(released) == 8


async def test_a_cancellation_that_a_members_own_code_lets_out_is_an_error_and_no_stop():
    def cancels(request: Request, turn: int) -> str:
        raise asyncio.CancelledError("of a library")

    with pytest.raises(RuntimeError, match="CancelledError"):
        await runner(response=cancels).play(tasks(), 1, "step1")


async def test_cancelling_from_outside_stops_everything():
    requested = asyncio.Event()

    async def forever(request: Request, turn: int) -> str:
        requested.set()
        await asyncio.Event().wait()
        return "a"

    running = asyncio.create_task(
        runner(response=lambda request, turn: forever(request, turn)).play(tasks(), 4, "step1")
    )
    await requested.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_threads_of_envs_do_not_pile_up():
    before = set(threading.enumerate())
    play(runner(group_size=8), tasks(), 8)
    made = [thread for thread in threading.enumerate() if thread not in before and "-env-" in thread.name]
    for thread in made:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_lockstep_batches_above_the_concurrency_limit_do_not_deadlock():
    sizes: list[int] = []

    class Counting:
        policy_version = 0

        def __init__(self) -> None:
            self.inner = script(lambda request, turn: "a")

        async def generate_batch(self, requests: list[Request]) -> Any:
            sizes.append(len(requests))
            return await self.inner.generate_batch(requests)

        def release(self, trajectory_id: str) -> None: ...
        def close(self) -> None: ...

    def played(**limits: Any) -> Rollouts:
        sizes.clear()
        return asyncio.run(
            asyncio.wait_for(
                runner(Once, LockstepBatching(Counting()), group_size=4, **limits).play(tasks(), 3, "step1"), LIMIT
            )
        )

    assert len(played(max_concurrent=2).groups) == 3  # a batch holds whole groups, at least one
    assert sizes == [4, 4, 4]
    assert len(played(max_concurrent=9).groups) == 3
    assert sizes == [8, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return sharp_model(tiny.build(tmp_path_factory.mktemp("tiny") / "qwen3_vl"))


class Uneven(Gallery):
    """Episodes of different lengths, whose steps take different times, and now and then fail once."""

    failures: ClassVar[set[str]] = set()
    lock: ClassVar = threading.Lock()

    def step(self, response_text: str) -> Step:
        observation, _, info = super().step(response_text)
        with self.lock:
            if self.turn and response_text not in self.failures and len(self.failures) < 2:
                self.failures.add(response_text)
                raise OSError("once")
        return observation, len(response_text) % 5 == 0, info


def lockstep_run(model: LoadedModel) -> list[Any]:
    Uneven.failures.clear()
    engine = HFEngine(model.policy, model.renderer)
    rollout = Rollout(
        group_size=3, max_turns=3, max_response_tokens=60, max_tokens=600, max_concurrent=6, truncated_reward=0.0
    )
    loop = TurnLoop(resolve_env(Uneven), LockstepBatching(engine), model.renderer, model.new_store(), rollout, seed=3)
    rollouts = asyncio.run(Runner(loop).play(gallery(4), 4, "step1"))
    engine.close()
    assert len(Uneven.failures) == 2
    return [
        (t.id, t.ending, [(u.prompt_ids, u.response_ids, u.logprobs, [m.id for m in u.media]) for u in t.turns])
        for t in rollouts.trajectories
    ]


def test_lockstep_batching_gives_the_same_trajectories_twice(model: LoadedModel):
    first, second = lockstep_run(model), lockstep_run(model)
    assert first == second
    assert len(first) == 12
    assert {len(turns) for _, _, turns in first} == {1, 2, 3}  # episodes of all lengths
    assert len({str(turns) for _, _, turns in first}) > 9  # a short response may be drawn twice


async def test_a_lockstep_batch_waits_for_all_and_is_in_task_order():
    batches: list[list[str]] = []

    class Naming:
        policy_version = 3

        async def generate_batch(self, requests: list[Request]) -> list[Any]:
            batches.append([request.trajectory_id for request in requests])
            return [f"to {request.trajectory_id}" for request in requests]

    engine = LockstepBatching(Naming())  # type: ignore[arg-type]
    engine.join(4)
    requests = [asyncio.create_task(engine.generate(Request(name, [1]))) for name in ("g/02", "g/00", "g/01")]
    await asyncio.sleep(0)  # the three requests are made
    assert batches == []  # the fourth is missing
    engine.drop()
    assert await asyncio.gather(*requests) == ["to g/02", "to g/00", "to g/01"]
    assert batches == [["g/00", "g/01", "g/02"]]
    assert engine.policy_version == 3


def test_a_cancelled_request_is_not_in_the_lockstep_batch():
    batches: list[list[str]] = []

    class Naming:
        policy_version = 0

        async def generate_batch(self, requests: list[Request]) -> list[Any]:
            batches.append([request.trajectory_id for request in requests])
            return [None] * len(requests)

    async def go() -> None:
        engine = LockstepBatching(Naming())  # type: ignore[arg-type]
        engine.join(2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.generate(Request("late", [1]))
        await asyncio.gather(engine.generate(Request("late again", [1])), engine.generate(Request("other", [1])))

    asyncio.run(go())
    assert batches == [["late again", "other"]]
