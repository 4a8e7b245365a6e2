"""Seeds and controls one after the other: what is run, what is skipped, what an error leaves."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from vlmrl.config import Config, Optim
from vlmrl.run.checkpointing import record_saved
from vlmrl.run.reproduction import Experiment, ExperimentError, plan_experiments, reproduce, settings_digest


def planned(folder: Path, *controls: str) -> list[Experiment]:
    return plan_experiments("say.py", ["--optim.lr", "1.0"], Config(name="say"), folder, [3, 4], controls)


class Commands:
    """Writes what a command would write, unless ``fails`` has its status."""

    def __init__(self, **fails: int) -> None:
        self.seen: list[tuple[str, str]] = []
        self.fails = fails

    def __call__(self, arguments: Sequence[str]) -> int:
        given = dict(pairwise(arguments))
        name = Path(given.get("--name") or given["--models"]).name
        self.seen.append((arguments[0], name))
        if arguments[0] == "eval":
            rows = [{"blanked": False}, *[{"blanked": True}] * ("--eval.blank-images" in arguments)]
            Path(given["--out"]).write_text(json.dumps({"results": rows}))
            return 0
        status, run = self.fails.pop(name, 0), Path(given["--output-dir"]) / name
        if status not in (0, 130, 143):
            return status
        (run / "model").mkdir(parents=True, exist_ok=True)  # also of a run that is stopped
        (run / "model/config.json").write_text("{}")
        (run / "summary.json").write_text(
            json.dumps({"reward_before": 0.2} | ({} if status else {"reward_after": 0.5}))
        )
        (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        return status


def test_the_seeds_come_first_and_then_the_control_with_the_first_of_them(tmp_path):
    first, second, control = planned(tmp_path, "shuffled", "blanked")
    assert [each.title for each in (first, second, control)] == ["seed 3", "seed 4", "shuffled rewards, seed 3"]
    assert first.train == [
        *("train", "say.py", "--optim.lr", "1.0", "--output-dir", str(tmp_path)),
        *("--name", "say-seed3", "--seed", "3", "--resume"),
    ]
    assert first.evaluate[-5:] == [
        *("--eval.blank-images", "--models", str(tmp_path / "say-seed3")),
        *("--out", str(tmp_path / "say-seed3-evaluation.json")),
    ]
    assert control.run.name == "say-shuffled3" and "--train.shuffle-rewards" in control.train
    assert "--eval.no-blank-images" in control.evaluate
    assert [each.control for each in planned(tmp_path)] == [False, False]


def test_each_experiment_trains_and_is_evaluated_once(tmp_path):
    commands, said = Commands(), []
    results = reproduce(planned(tmp_path, "shuffled"), commands, said.append)
    names = ["say-seed3", "say-seed4", "say-shuffled3"]
    assert commands.seen == [(command, name) for name in names for command in ("train", "eval")]
    assert [(each.title, each.control) for each in results][1:] == [
        ("seed 4", False),
        ("shuffled rewards, seed 3", True),
    ]
    assert results[0].rows == [{"step": 1, "reward/mean": 0.5}]
    assert said[0].startswith("say-seed3 (1 of 3): vlmrl train say.py")
    commands.seen.clear()
    assert reproduce(planned(tmp_path, "shuffled"), commands, said.append) == results
    assert commands.seen == []
    shutil.rmtree(tmp_path / "say-seed4")
    reproduce(planned(tmp_path), commands, said.append)
    assert commands.seen == [("train", "say-seed4"), ("eval", "say-seed4")]


def test_a_control_of_blanked_images_is_evaluated_that_an_earlier_command_left_out(tmp_path):
    commands = Commands()
    reproduce(planned(tmp_path), commands, print)
    for seen in ([("eval", "say-seed3"), ("eval", "say-seed4")], []):
        commands.seen.clear()
        results = reproduce(planned(tmp_path, "blanked"), commands, print)
        assert commands.seen == seen
        assert [row["blanked"] for row in results[0].evaluation["results"]] == [False, True]


def test_an_error_stops_and_the_next_call_goes_on_there(tmp_path):
    commands = Commands(**{"say-seed4": 1})
    with pytest.raises(ExperimentError, match=r"say-seed4: its command ended with status 1.*repeat the command"):
        reproduce(planned(tmp_path), commands, print)
    commands.seen.clear()
    reproduce(planned(tmp_path), commands, print)
    assert commands.seen == [("train", "say-seed4"), ("eval", "say-seed4")]


@pytest.mark.parametrize("status", [130, 143])
def test_a_signal_ends_the_command_with_its_status_and_the_next_call_trains_on(tmp_path, status):
    """The stopped run has saved its weights: they are not evaluated as if they were trained to the end."""
    commands = Commands(**{"say-seed3": status})
    with pytest.raises(SystemExit, match=str(status)):
        reproduce(planned(tmp_path), commands, print)
    commands.seen.clear()
    reproduce(planned(tmp_path), commands, print)
    assert commands.seen[:2] == [("train", "say-seed3"), ("eval", "say-seed3")]


def test_a_run_that_was_killed_before_it_saved_its_last_model_is_continued(tmp_path):
    """It was stopped at step 20, and killed after the evaluation of step 40: its model is that of step 20."""
    first = planned(tmp_path)[0]
    reproduce([first], Commands(), print)
    for step in (20, 40):
        checkpoint = first.run / f"checkpoints/step{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "run.json").write_text(json.dumps({"step": step}))
        record_saved(first.run, "summary.json")
        if step == 20:
            record_saved(first.run, "model")
    commands = Commands()
    reproduce([first], commands, print)
    assert commands.seen == [("train", "say-seed3"), ("eval", "say-seed3")]
    record_saved(first.run, "model")
    reproduce([first], commands, print)
    assert len(commands.seen) == 2


def test_settings_have_a_folder_of_their_own_but_a_name_or_seed_has_not():
    config = Config(name="say")
    assert settings_digest(replace(config, name="other", seed=3, output_dir="x")) == settings_digest(config)
    assert settings_digest(replace(config, optim=Optim(lr=1.0))) != settings_digest(config)
