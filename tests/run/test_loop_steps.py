"""The order in which a small run plays, trains, pushes weights, evaluates and saves, also when it is stopped or fails."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from vlmrl.config import Algo, Checkpoint, Config, Data, Eval, EvalData, Model, Rollout, Train, WarmStart
from vlmrl.env.base import Env, obs
from vlmrl.env.session import EnvContractError
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import checkpointing, loop, stages, stopping
from vlmrl.run.build import Run, build_run
from vlmrl.run.loop import new_trainer
from vlmrl.run.stopping import RunStopped, StopRequest
from vlmrl.train.trainer import Trainer

pytestmark = pytest.mark.slow


def task(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": f"Say {index}.", "answer": "play"}


def held_out(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": f"Tell {index}.", "answer": "evaluate"}


def with_image(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "<image>Say it.", "answer": "play", "images": [Image.new("RGB", (64, 64), "red")]}


def demonstrate(task: Any, turn: int) -> str:
    return "a"


def train(steps: int = 2, **settings: Any) -> Train:
    return Train(**{"steps": steps, "groups_per_batch": 1, "image_check": False} | settings)


EVALUATED = Eval(data=EvalData(generator=held_out, size=1), every=1)


class SmallRun:
    """A real run of two episodes a step. ``events`` is what its env, engine and trainer were told, in order.

    An event and how often it came may be the moment at which the run is asked to stop, at which it fails, or of an episode that hangs.
    """

    def __init__(
        self,
        patch: Any,
        folder: Path,
        model: Path,
        stops: Any = None,
        fails: Any = None,
        hangs: Any = None,
        **changes: Any,
    ) -> None:
        self.events: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.said = io.StringIO()
        self.stop, self.stops, self.fails, self.hangs = StopRequest(), stops, fails, hangs

        async def step(env: Env, response: str) -> Any:
            return await self.step(env.task.answer, response)

        settings = {"train": train(), "data": Data(generator=task, size=8), "save_model": False} | changes
        rollout = Rollout(group_size=2, max_tokens=256, max_response_tokens=4, stop=("",))
        model_settings = Model(path=str(model), device="cpu")
        env = type("Watching", (Env,), {"step": step})
        config = Config(
            name="small", output_dir=str(folder), model=model_settings, env=env, rollout=rollout, **settings
        )
        self.run = build_run(config)
        for name in ("pause", "resume", "weights_changed"):
            self.watch(self.run.engine, name)

        def watched(run: Run) -> Any:
            trainer = new_trainer(run)
            for name in ("end_schedule_at", "step", "save", "score"):
                self.watch(trainer, name)
            return trainer

        patch.setattr(loop, "new_trainer", watched)

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            moment = self.note(" ".join([name, *(str(value) for value in args if isinstance(value, int))]))
            result = original(*args, **kwargs)
            if moment == self.fails:
                raise OSError("the disk is full")
            return result

        setattr(owner, name, call)

    def note(self, event: str) -> tuple[str, int]:
        """The event, and how often it has come: in one thread, while others come in another."""
        self.events.append(event)
        moment = (event, self.events.count(event))
        if moment == self.stops:
            self.stop.request(signal.SIGTERM)
        return moment

    async def step(self, kind: str, response: str) -> Any:
        moment = self.note(kind)
        if moment in (self.stops, self.hangs):
            await asyncio.get_running_loop().create_future()  # only the stop ends it
        return None if moment == self.fails else (obs(), True, {"reward": float(len(self.events) % 2)})

    def train(self, checkpoint: Path | None = None) -> list[str]:
        sizes = json.loads((checkpoint / "run.json").read_text())["log"] if checkpoint else None
        log = RunLog(self.run.folder, sizes)
        try:
            asyncio.run(loop.train(self.run, log, RunProgress(Console(file=self.said)), checkpoint, self.stop))
        finally:
            log.close()
            self.rows = log.rows()
        return self.events

    @property
    def saved(self) -> Path:
        newest = self.run.checkpoints.newest()
        assert newest is not None
        return newest

    def steps(self, metric: str) -> list[int]:
        """The steps of the rows with a metric."""
        return [row["step"] for row in self.rows if metric in row]


@pytest.fixture
def small(tmp_path, qwen3_vl, monkeypatch):
    return lambda **changes: SmallRun(monkeypatch, tmp_path, qwen3_vl, **changes)


def only(events: list[str], *names: str) -> list[str]:
    return [event for event in events if event in names]


def test_a_synchronous_step_trains_and_pushes_while_the_engine_is_paused(small):
    """Each batch has two optimizer steps, and ends at its place in the schedule however many it takes."""
    one = small(train=train(groups_per_batch=2, groups_per_step=1))
    assert one.train() == [
        *["pause", "resume"],  # while the trainer is made
        *[*["play"] * 4, "pause", "end_schedule_at 2", "step", "weights_changed 1", "resume"],
        *[*["play"] * 4, "pause", "end_schedule_at 4", "step", "weights_changed 2", "resume"],
    ]
    assert sorted(path.name for path in one.run.folder.iterdir() if path.is_dir()) == []  # no model, no checkpoint


def test_an_asynchronous_step_pauses_for_the_weights_alone_after_a_running_evaluation(small):
    algo = Algo(corrections=("token_truncation",))
    one = small(train=train(3, max_staleness=1), algo=algo, eval=EVALUATED)
    pushes = [["step", "pause", f"weights_changed {step}", "resume"] for step in (1, 2, 3)]
    told = [event for event in one.train() if event not in ("play", "evaluate")]
    assert [event for event in told if "schedule" not in event] == ["pause", "resume", *chain(*pushes)]
    assert [event for event in told if "schedule" in event] == [f"end_schedule_at {step}" for step in (1, 2, 3)]
    assert one.steps("eval/reward/mean") == [0, 1, 2, 3]  # each under the weights of its step, before the next push
    moments = [index for index, event in enumerate(one.events) if event == "evaluate"]
    pushed = [one.events.index(f"weights_changed {step}") for step in (1, 2, 3)]
    assert moments[0] < pushed[0] < moments[1] < pushed[1] < moments[2] < pushed[2] < moments[3]


EVERY_SECOND = """
groups = []

def keep(group):
    groups.append(group)
    return len(groups) % 2 == 0
"""


def test_optimizer_steps_from_few_groups_are_reported_once(small, tmp_path):
    (tmp_path / "every_second.py").write_text(EVERY_SECOND)
    algo = Algo(filters=(f"{tmp_path}/every_second.py:keep",))
    one = small(train=train(groups_per_batch=2), algo=algo)
    one.train()
    said = " ".join(one.said.getvalue().split())
    assert one.events.count("step") == 2 and said.count("took an optimizer step from 1 of 2 groups") == 1


def test_images_are_swapped_before_the_first_update_only(small):
    data = Data(generator=with_image, size=8)
    assert only(small(train=train(image_check=True), data=data).train(), "score", "step")[-3:] == [
        "score",
        "step",
        "step",
    ]


def test_images_are_not_swapped_if_the_setting_is_off(small):
    one = small(train=train(1), data=Data(generator=with_image, size=8))
    assert only(one.train(), "score", "step") == ["step"]


def test_a_run_warms_up_is_evaluated_and_saves_and_a_resumed_one_takes_the_steps_that_are_left(small):
    warm = WarmStart(demonstrate=demonstrate, steps=1, trajectories_per_step=2)
    blanked = Eval(data=EVALUATED.data, every=1, blank_images=True)
    one = small(train=train(3), warm_start=warm, eval=blanked, checkpoint=Checkpoint(every=2), save_model=True)
    one.train()
    assert only(one.events, "play", "evaluate")[:3] == ["play", "play", "evaluate"]  # the warm start
    assert only(one.events, "evaluate", "step", "save") == [
        *["evaluate", "step", "evaluate"],
        *["step", "evaluate", "save"],
        *["step", "save"],  # and at the end, after the last
        *["evaluate", "evaluate"],
    ]
    assert one.steps("eval/reward/mean") == [0, 1, 2, 3] and one.steps("blanked/reward/mean") == [3]
    assert (one.run.folder / "model/config.json").exists()
    summary = json.loads((one.run.folder / "summary.json").read_text())
    assert {"reward_before", "reward_after", "reward_blanked"} <= summary.keys()
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["step"], state["evaluated"], state["batches"]["tasks"]["drawn"]) == (3, True, 3)

    more = small(train=train(5), warm_start=warm, eval=EVALUATED)
    more.train(one.saved)
    restored = ["pause", "weights_changed 3", "resume"]
    assert more.events[:5] == [*restored, "play", "play"]  # neither warmed up nor evaluated again
    assert only(more.events, "evaluate", "step") == ["step", "evaluate", "step", "evaluate"]
    assert more.steps("loss") == [1, 2, 3, 4, 5] and more.steps("eval/reward/mean") == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("stops", "saved"),
    [
        (("evaluate", 1), None),  # there is nothing to save yet
        (("play", 1), (0, True)),
        (("play", 3), (1, True)),  # the rollouts are given up
        (("step", 1), (1, False)),  # an update is finished, its evaluation is left to the resumed run
        (("evaluate", 2), (1, False)),
        (("evaluate", 3), (2, True)),
    ],
)
def test_a_stopped_run_saves_the_state_of_its_last_finished_step(small, stops, saved):
    one = small(stops=stops, eval=EVALUATED, checkpoint=Checkpoint(every=2))
    with pytest.raises(RunStopped) as stopped:
        one.train()
    assert stopped.value.status == 143
    if saved is None:
        assert one.run.checkpoints.newest() is None and "play" not in one.events
        return
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["step"], state["evaluated"]) == saved
    assert (one.run.folder / "summary.json").exists() and (one.run.folder / "reward.png").exists()
    again = small(eval=EVALUATED)
    again.train(one.saved)
    assert again.steps("loss") == [1, 2] and again.steps("eval/reward/mean") == [0, 1, 2]


def test_without_checkpoints_a_stopped_run_has_its_model_before_it_saves_one_and_its_curve_after(small, monkeypatch):
    """SIGTERM may end it while the checkpoint is written, or the page, which reads all trajectories."""
    one, found = small(stops=("play", 3), eval=EVALUATED, save_model=True), dict[str, bool]()
    write = checkpointing.write_checkpoint

    def watched(run: Run, *state: Any) -> None:
        found.update({name: (run.folder / name).exists() for name in ("reward.png", "trajectories.html", "model")})
        write(run, *state)

    monkeypatch.setattr(checkpointing, "write_checkpoint", watched)
    with pytest.raises(RunStopped):
        one.train()
    assert found == {"reward.png": False, "trajectories.html": False, "model": True}
    assert all((one.run.folder / name).exists() for name in found)
    assert json.loads((one.saved / "run.json").read_text())["step"] == 1


def test_without_checkpoints_a_run_that_is_stopped_before_a_step_saves_none(small):
    one = small(stops=("play", 1), save_model=True)
    with pytest.raises(RunStopped):
        one.train()
    assert one.run.checkpoints.newest() is None


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("name", "saved"), [("pause", None), ("push_weights", 2), ("resume", 2)])
def test_a_stop_waits_for_no_server_that_hangs_in_an_update(small, monkeypatch, name, saved, staleness):
    """A run that SIGTERM or Ctrl-C stopped meanwhile was ended, or stood for minutes, and lost all steps since its last checkpoint."""
    monkeypatch.setattr(stopping, "FINISH_SECONDS", 0.1)
    algo = Algo(corrections=("token_truncation",) * staleness)
    one = small(train=train(3, max_staleness=staleness), algo=algo, checkpoint=Checkpoint(every=9))
    owner = stages if name == "push_weights" else one.run.engine
    original = getattr(owner, name)
    calls = count(1 if name == "push_weights" else 0)  # the engine is also paused before the first update

    async def hangs(*args: Any) -> Any:
        if next(calls) >= 2:
            one.stop.request(signal.SIGTERM)
            await asyncio.get_running_loop().create_future()
        return await original(*args)

    monkeypatch.setattr(owner, name, hangs)
    with pytest.raises(RunStopped):
        one.train()
    trained = saved or (2 if staleness else 1)  # an asynchronous run has trained before it pauses
    assert json.loads((one.saved / "run.json").read_text())["step"] == trained and one.steps("loss")[-1] == trained


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_seconds_of_a_transfer_have_the_wait_for_the_pause_in_an_asynchronous_run(small, staleness):
    """There responses in flight may make it long; else nothing is sampled then."""
    one = small(train=train(2, max_staleness=staleness), algo=Algo(corrections=("token_truncation",) * staleness))
    seconds, pause, open_parts, seen = one.run.seconds, one.run.engine.pause, [], []
    of = seconds.of

    @contextmanager
    def measured(part):
        open_parts.append(part)
        with of(part):
            yield
        open_parts.remove(part)

    async def paused():
        seen.append("transfer" in open_parts)
        await pause()

    seconds.of, one.run.engine.pause = measured, paused
    one.train()
    assert len(seen) > 2 and seen[-1] == bool(staleness)


def test_a_stop_interrupts_the_evaluation_that_an_asynchronous_update_waits_for_and_finishes_the_update(small):
    algo = Algo(corrections=("token_truncation",))
    settings = {"train": train(3, max_staleness=1), "algo": algo, "eval": EVALUATED, "checkpoint": Checkpoint(every=9)}
    one = small(stops=("step", 2), hangs=("evaluate", 2), **settings)
    with pytest.raises(RunStopped):
        one.train()
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["step"], state["evaluated"]) == (2, False) and one.events.count("weights_changed 2") == 1


def test_an_evaluation_that_an_asynchronous_run_dropped_is_made_up_for_after_the_step_that_was_finished(small):
    """The evaluation after step 2 is stopped when step 3 is trained: its weights are gone, and those of step 3 are evaluated."""
    algo, evaluated = Algo(corrections=("token_truncation",)), Eval(data=EVALUATED.data, every=2)
    settings = {"train": train(6, max_staleness=1), "algo": algo, "eval": evaluated, "checkpoint": Checkpoint(every=9)}
    one = small(stops=("step", 3), hangs=("evaluate", 2), **settings)
    with pytest.raises(RunStopped):
        one.train()
    assert one.steps("eval/reward/mean") == [0]
    again = small(**settings)
    again.train(one.saved)
    assert again.steps("loss") == [1, 2, 3, 4, 5, 6] and again.steps("eval/reward/mean") == [0, 3, 4, 6]


@pytest.mark.parametrize(("plays", "save_model", "rescued"), [(1, True, False), (3, True, True), (3, False, False)])
def test_a_run_that_fails_keeps_its_weights_if_it_took_a_step(small, plays, save_model, rescued):
    one = small(fails=("play", plays), save_model=save_model)
    with pytest.raises(EnvContractError, match="step must return"):
        one.train()
    assert (one.run.folder / "model/config.json").exists() is rescued
    assert not (one.run.folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("fails", "saved"),
    [
        (("play", 1), None),  # no step was finished
        (("play", 3), (1, True)),
        (("evaluate", 2), (1, False)),
        (("step", 2), None),  # the trainer may hold half an update
        (("weights_changed 2", 1), None),  # or a whole one, which a resumed run would take again
    ],
)
def test_a_run_that_fails_outside_an_update_saves_the_state_of_its_last_finished_step(small, fails, saved):
    settings = {"train": train(3), "eval": EVALUATED, "checkpoint": Checkpoint(every=9)}
    one = small(fails=fails, **settings)
    with pytest.raises((EnvContractError, OSError)):
        one.train()
    if saved is None:
        assert one.run.checkpoints.newest() is None
        return
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["step"], state["evaluated"]) == saved
    again = small(**settings)
    again.train(one.saved)
    assert again.steps("loss") == [1, 2, 3] and again.steps("eval/reward/mean") == [0, 1, 2, 3]


def test_a_first_step_that_fails_after_a_warm_start_loses_none_of_it(small):
    """The trainer of the run has taken no step then, and without `checkpoint.every` the stage before it has no checkpoint."""
    settings = {"warm_start": WarmStart(demonstrate=demonstrate, steps=1, trajectories_per_step=1), "save_model": True}
    one = small(fails=("play", 2), **settings)
    with pytest.raises(EnvContractError):
        one.train()
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["stage"], state["step"], state["earlier_steps"]) == ("train", 0, 1)
    assert (one.run.folder / "model/config.json").exists()
    assert "the state before step 1 of stage train is saved" in one.said.getvalue()
    again = small(**settings)
    again.train(one.saved)
    assert again.steps("sft/loss") == [1] and again.steps("loss") == [1, 2]


@pytest.mark.parametrize("method", ["_update", "__init__"])
def test_the_weights_of_a_warm_start_outlive_a_trainer_that_fails(small, monkeypatch, method):
    """A GPU may have too little memory for the first update of a run, or for its teacher."""

    def watched(run: Run) -> Any:
        monkeypatch.setattr(Trainer, method, None)  # of the run, no longer of the warm start
        return new_trainer(run)

    one = small(warm_start=WarmStart(demonstrate=demonstrate, steps=1, trajectories_per_step=1), save_model=True)
    monkeypatch.setattr(loop, "new_trainer", watched)
    with pytest.raises(TypeError):
        one.train()
    assert (one.run.folder / "model/config.json").exists() and one.run.checkpoints.newest() is None
    assert "could not be saved" not in one.said.getvalue()


def test_an_asynchronous_step_is_finished_and_saved_when_the_evaluation_before_it_failed(small):
    algo = Algo(corrections=("token_truncation",))
    settings = {"train": train(3, max_staleness=1), "algo": algo, "eval": EVALUATED, "checkpoint": Checkpoint(every=9)}
    one = small(fails=("evaluate", 2), **settings)
    with pytest.raises(EnvContractError, match="step must return"):
        one.train()
    state = json.loads((one.saved / "run.json").read_text())
    assert (state["step"], state["evaluated"]) == (2, False) and one.events.count("weights_changed 2") == 1
    again = small(**settings)
    again.train(one.saved)
    assert again.steps("loss") == [1, 2, 3] and again.steps("eval/reward/mean") == [0, 2, 3]


def test_a_stopped_run_whose_checkpoint_cannot_be_saved_saves_the_rest(small):
    """Such as one whose other rank was killed, for which the launcher sends this one SIGTERM."""
    one = small(stops=("play", 3), fails=("save", 1), save_model=True, checkpoint=Checkpoint(every=9))
    with pytest.raises(RunStopped):
        one.train()
    assert "could not be saved: the disk is full" in one.said.getvalue() and one.run.checkpoints.newest() is None
    for name in ("model/config.json", "summary.json", "reward.png", "trajectories.html"):
        assert (one.run.folder / name).exists(), name


def test_the_engine_is_resumed_when_training_fails(small):
    one = small(fails=("step", 1))
    with pytest.raises(OSError, match="the disk is full"):
        one.train()
    assert one.events[-4:] == ["pause", "end_schedule_at 1", "step", "resume"]
