"""What a run leaves in its folder, read with `vlmrl.load_run`."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from testing.fakes import make_trajectory

import vlmrl
from vlmrl import Algo, Config, Data, Env, Eval, EvalData, Model, Optim, Rollout, Train, WarmStart, obs
from vlmrl.report.advisories import PAGE
from vlmrl.report.progress import Phase, RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.rollout.batches import GroupBatch
from vlmrl.rollout.runner import RolloutError, Rollouts
from vlmrl.run import loop, program
from vlmrl.run.build import build_run
from vlmrl.run.recorder import _batch_metrics

resets = 0


def make_task(index: int, seed: int) -> dict:
    return {"prompt": "<image>Which?", "images": [Image.new("RGB", (64, 64), (40 * index, seed, 0))]}


class SometimesFails(Env):
    """Every fourth episode fails at its start; the others have rewards that differ."""

    def reset(self):
        global resets
        resets += 1
        if resets % 4 == 0:
            raise OSError(f"no luck at {resets}")

    def step(self, response_text: str):
        return obs(""), True, {}

    def finish(self, ending: str) -> float:
        return float(resets % 3)


class AlwaysFails(SometimesFails):
    def reset(self):
        raise OSError("no luck at all")


def config(folder: Path, **changes) -> Config:
    data = Data(generator=f"{__file__}:make_task", size=4)
    limits = {"group_size": 2, "max_tokens": 256, "max_response_tokens": 4, "max_env_retries_per_turn": 0}
    settings = Config(
        name="recorded",
        output_dir=str(folder / "runs"),
        model=Model(path="tiny:qwen3_vl"),
        data=data,
        env=SometimesFails,
        rollout=Rollout(**limits, max_failed_fraction=1.0, max_refills=4),
        optim=Optim(lr=1e-4),
        train=Train(steps=1, groups_per_batch=2, image_check=False),
        save_model=False,
    )
    return replace(settings, **changes)


def run_once(config: Config) -> str:
    """Train, and return what the console shows."""
    run = build_run(config)
    console = Console(file=io.StringIO(), soft_wrap=True)
    try:
        with RunLog(run.folder) as log:
            asyncio.run(loop.train(run, log, RunProgress(console)))
    finally:
        run.engine.close()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_trajectory_is_in_the_folder_with_the_trainers_numbers(tmp_path: Path):
    data = Data(generator=f"{__file__}:make_task", size=2, seed=1)
    settings = config(tmp_path, eval=Eval(data=EvalData(generator=data.generator, size=2, seed=1), blank_images=True))
    output = run_once(settings)
    run = vlmrl.load_run(settings.folder)
    assert {(record["step"], record["kind"]) for record in run.trajectories()} == {
        (0, "eval"),
        (1, "train"),
        (1, "eval"),
        (1, "blanked"),
    }
    trained = [record for record in run.trajectories(1, "train") if record["ending"] != "error"]
    assert len(trained) == run.metrics[1]["trajectories"] - run.metrics[1]["failed"] == 4
    for record in trained:
        [turn] = record["turns"]
        columns = [turn[name] for name in ("tokens", "logprobs", "trainer_logprobs", "advantages", "loss_mask")]
        assert len({len(column) for column in columns}) == 1
        assert np.allclose(turn["logprobs"], turn["trainer_logprobs"], atol=1e-4)
        assert set(turn["loss_mask"]) == {1}
    for record in run.trajectories():
        for turn in record["turns"]:
            assert run.image(turn["images"][0]).width == 64
    failed = [record for record in run.trajectories() if record["ending"] == "error"]
    assert failed
    assert [record["id"] for record in failed] == [failure["id"] for failure in run.failures]
    assert len({failure["reason"] for failure in run.failures if failure["kind"] == "train"}) <= 1
    assert output.count("no luck at") == len({(failure["step"], failure["kind"]) for failure in run.failures})
    assert (
        "advisory    step 1: every response was cut at rollout.max_response_tokens (4) before step() was called"
        in output
    )
    assert [advisory["name"] for advisory in run.advisories] == ["truncated"]
    assert (settings.folder / "reward.png").exists()
    assert (settings.folder / "trajectories.html").exists()


def test_a_run_that_stops_for_too_many_failures_has_written_them(tmp_path: Path):
    settings = config(tmp_path, env=AlwaysFails)
    settings = replace(settings, rollout=replace(settings.rollout, max_failed_fraction=0.25, max_refills=0))
    reason = r"(?s)failed where 4 were requested, more than rollout.max_failed_fraction.*OSError: no luck at all"
    with pytest.raises(RolloutError, match=reason):
        run_once(settings)
    run = vlmrl.load_run(settings.folder)
    assert len(run.failures) == len(run.trajectories(1, "train")) >= 2
    assert {failure["retried"] for failure in run.failures} == {False}


def test_an_evaluation_that_fails_says_so_in_its_line_and_in_its_error(tmp_path: Path, monkeypatch):
    data = Data(generator=f"{__file__}:make_task", size=4)
    settings = config(tmp_path, env=AlwaysFails, eval=Eval(data=EvalData(generator=data.generator, size=4, seed=1)))
    settings = replace(settings, rollout=replace(settings.rollout, max_failed_fraction=0.5, max_refills=0))
    notes = []
    monkeypatch.setattr(Phase, "advance", lambda phase, **numbers: notes.append(numbers))
    with pytest.raises(RolloutError, match=r"^evaluation eval000000: 3 trajectories failed where 4 were requested"):
        run_once(settings)
    assert notes == [{"reward": None, "failed": 1}, {"reward": None, "failed": 2}]


class SaysYes(Env):
    unfinished_reward = 0.25  # as guessing earns; many responses are cut

    def step(self, response_text: str):
        return obs(""), True, {"reward": 1.0 if response_text == "yes" else 0.25}


def test_a_warm_start_that_leaves_the_reward_at_chance_is_named_before_the_first_step_and_at_the_end(tmp_path, capsys):
    settings = config(tmp_path, env=SaysYes, warm_start=WarmStart(lambda task, turn: "yes", 1, 2))
    data = EvalData(generator=settings.data.generator, size=2, seed=1)
    program.run_training(replace(settings, eval=Eval(data=data, chance=0.25)))
    before, after = capsys.readouterr().out.split("train       1/1")
    advisory = (
        "before RL the reward is 0.250 ± 0.000, which is guessing (eval.chance 0.25), and demonstrations earn 1.000: "
    )
    assert f"advisory    step 0: {advisory}" in before and f"{PAGE}#starts_at_chance" in before
    assert f"training is guessing, within two standard errors: see {PAGE}#starts_at_chance\n" in after


def test_a_command_that_fails_leaves_a_crash_report_with_the_trajectory(tmp_path: Path, monkeypatch, capsys):
    def break_row(*args, **kwargs):
        raise ValueError("trajectory step000001/00000/00, turn 0: the row is broken")

    monkeypatch.setattr(loop, "audited_samples", break_row)
    settings = config(tmp_path)
    with pytest.raises(ValueError, match="the row is broken"):
        program.run_training(settings)
    report = (settings.folder / "crash.txt").read_text()
    assert '"id": "step000001/00000/00"' in report
    assert "rollout.group_size = 2" in report
    assert f"crash report: {settings.folder / 'crash.txt'}" in capsys.readouterr().out


def test_a_steps_time_of_envs_is_what_they_computed_and_not_what_they_waited():
    played = [make_trajectory(name, metrics={"env_seconds": 20.0, "env_cpu_seconds": 0.25}) for name in ("a", "b")]
    failed = make_trajectory("c", ending="error", error="x", metrics={"env_seconds": 30.0, "env_cpu_seconds": 0.5})
    agent = make_trajectory("d", metrics={"agent_seconds": 9.0})
    rollouts = Rollouts(groups=[[*played, agent]], failed=[failed])
    assert _batch_metrics(GroupBatch(rollouts=rollouts), Config())["time/env"] == 1.0


def test_a_steps_failed_trajectories_count_among_its_endings_and_retries():
    played = [make_trajectory("a", ending="env_done")]
    failed = [make_trajectory("b", ending="error", error="x", metrics={"env_errors": 2.0})]
    metrics = _batch_metrics(GroupBatch(rollouts=Rollouts(groups=[played], failed=failed)), Config())
    found = {name: metrics[name] for name in ("trajectories", "failed", "ending/error", "retries/env_errors")}
    assert found == {"trajectories": 2.0, "failed": 1.0, "ending/error": 0.5, "retries/env_errors": 2.0}


@pytest.mark.parametrize(("credit", "without"), [("trajectory", 2.0), ("turn", 1.0), ("gigpo", 1.0)])
def test_by_turn_a_group_is_without_variance_if_its_rewards_are_equal_turn_by_turn(credit, without):
    """Else `no_signal` speaks, and `train.stop_after_idle` ends the run, where the sums of its rewards are equal."""
    early, late = make_trajectory("early", final_reward=0.0), make_trajectory("late")
    early.turns[0].reward = 1.25
    groups = [[early, late], [late, late]]
    metrics = _batch_metrics(GroupBatch(rollouts=Rollouts(groups=groups)), Config(algo=Algo(credit=credit)))
    assert (metrics["groups/played"], metrics["groups/zero_variance"]) == (2.0, without)
