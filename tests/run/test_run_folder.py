"""A run and the files that it finds: resumes that are refused, earlier runs, the command that continues, full disks."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from testing.runs import short_quickstart

from vlmrl.config import Checkpoint, Config, Data, Eval, Lora, Model, Report, Teacher, Train, WarmStart
from vlmrl.model.tiny import build
from vlmrl.report.launch_command import resume_command, write_command
from vlmrl.report.records import plain
from vlmrl.report.trackers import TRACKERS, Tracker
from vlmrl.run import program
from vlmrl.run.checkpointing import LoopState, best_reward, save_model, save_summary, write_checkpoint
from vlmrl.run.program import run_training
from vlmrl.run.run_folder import (
    check_is_no_other,
    check_resume,
    describe_changes,
    earlier_run_set_aside,
    has_finished,
    newest_weights,
    trained_steps,
)
from vlmrl.train.checkpoint import Checkpoints
from vlmrl.utils.output_files import OutputError

ROW = json.dumps({"step": 120, "groups/trained": 4}) + "\n"
SAVED = asdict(LoopState(batches={"tasks": {"drawn": 4, "too_long": 0}, "started": 4, "unfinished": {"3": 3}}))
DATA = {"data": Data("rows.jsonl"), "reward": lambda text, task: 1.0}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def message_of(folder: Path) -> str | None:
    with earlier_run_set_aside(folder) as message:
        return message


def start_and_fail(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "gone.txt").read_text()


def test_an_earlier_run_is_put_back_if_the_new_one_cannot_start(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text(ROW)
    before = files(tmp_path)
    with pytest.raises(FileNotFoundError), earlier_run_set_aside(tmp_path / "x"):
        start_and_fail(tmp_path / "x/trackers")
    assert files(tmp_path) == before and not (tmp_path / "x/trackers").exists()


def test_an_earlier_run_is_set_aside_and_the_command_that_continues_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/x"
    (run / "checkpoints/step000100").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(ROW)
    write_command(run, ["vlmrl", "train", "my recipe.py", "--name", "x", "--resume", "--optim.lr", "1e-4"])
    assert message_of(Path("runs/x")) == (
        "earlier   runs/x held a run of 120 steps: it is now runs/x.1. To continue it instead: "
        "vlmrl train 'my recipe.py' --optim.lr 1e-4 --name x.1 --resume"
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x.1"]
    assert message_of(Path("runs/x")) is None


def test_a_run_without_a_checkpoint_says_that_it_cannot_go_on(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text(ROW)
    (tmp_path / "x/checkpoints/.step000001.part").mkdir(parents=True)  # of a run that was killed while it saved
    message = message_of(tmp_path / "x")
    assert message is not None and message.endswith("It has no checkpoint to continue from.")
    assert not any((tmp_path / "x.1/checkpoints").iterdir())
    (tmp_path / "x/model").mkdir(parents=True)
    message = message_of(tmp_path / "x")
    assert message is not None and message.endswith(f"--model.path {tmp_path / 'x.2/model'} begins with its weights.")


def test_a_fine_tuning_that_was_killed_before_a_checkpoint_is_set_aside(tmp_path):
    """Its metrics were emptied: hours of a run that a full memory ended, at the next command of its name."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 9, "sft/loss": 0.5}\n')
    message = message_of(tmp_path / "x")
    assert message is not None and "held a run of 9 steps" in message
    assert (tmp_path / "x.1/metrics.jsonl").exists()


def test_a_failed_attempt_that_trained_no_step_leaves_its_folder_to_the_next(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 0, "eval/reward/mean": 0.5}\n')
    (tmp_path / "x/config.json").write_text('{"model": {}, "rollout": {}, "train": {}}')
    (tmp_path / "x/notes.txt").write_text("mine")
    (tmp_path / "x/trackers").mkdir()
    (tmp_path / "x/trackers/wandb.id").write_text("5f3a")
    assert message_of(tmp_path / "x") is None
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["config.json", "metrics.jsonl", "notes.txt"]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "trajectories.jsonl"])
def test_a_run_empties_no_file_of_another_program(name, tmp_path):
    """Others write `metrics.jsonl`, too: it was emptied, and `config.json` replaced, without a word."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text('{"step": 1, "env/all/reward": 0.5}\n')
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"name must be that of a run, but .*x holds {name} of another program"):
        check_is_no_other(tmp_path / "x")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("settings", "holds"),
    [({"collect": {"model": "gpt-5-mini"}, "train": {}}, "collected episodes"), ({"model_type": "qwen3"}, "a model")],
)
def test_a_run_empties_no_folder_of_collected_episodes_and_of_a_model(settings, holds, tmp_path):
    """`vlmrl collect --out runs/round1`, then `vlmrl sft --name round1`: all records of the episodes were gone."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.json").write_text(json.dumps(settings))
    (tmp_path / "x/trajectories.jsonl").write_text(json.dumps({"id": "collect/00000/00"}) + "\n")
    before = files(tmp_path)
    made = Data(generator=lambda index, seed: {"prompt": "?"}, size=4)
    model = Model(path="tiny:qwen3", device="cpu")
    config = Config(
        name="x", output_dir=str(tmp_path), model=model, data=made, reward=lambda text, task: 1.0, train=Train(0)
    )
    with pytest.raises(ValueError, match=f"name must be that of a run, but .*x holds {holds}: set another name"):
        run_training(config)
    assert files(tmp_path / "x") == {name.removeprefix("x/"): content for name, content in before.items()}


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_does_not_begin_with_a_model_in_its_own_folder(resume, tmp_path, monkeypatch):
    """`vlmrl train --name x --model.path runs/x/model` with LoRA: the run wrote its own model there, to which a resume and an export
    added the adapters of its checkpoint again."""
    build(tmp_path / "real/model", "qwen3")
    (tmp_path / "real/metrics.jsonl").write_text(ROW)
    (tmp_path / "x").symlink_to("real")
    before = files(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = Model(path="~/real/model", device="cpu", lora=Lora(rank=2))
    made = Data(generator=lambda index, seed: {"prompt": "?"}, size=4)
    config = Config(
        name="x", output_dir=str(tmp_path), model=model, data=made, reward=lambda text, task: 1.0, train=Train(0)
    )
    with pytest.raises(ValueError, match=r"model\.path must be outside of .*x, where the run writes its own model"):
        run_training(config, resume=resume)
    teacher = replace(config, model=Model(path="tiny:qwen3", device="cpu"), teacher=Teacher(model=model.path))
    with pytest.raises(ValueError, match=r"teacher\.model must be outside of .*x, where the run writes its own model"):
        run_training(teacher, resume=resume)
    left = {name: content for name, content in files(tmp_path).items() if not name.startswith(".models")}
    assert left == before


def test_the_command_of_another_folder_names_it_and_torchrun_is_part_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write_command(tmp_path, ["python", "recipes/a.py", "--resume"])
    assert resume_command(tmp_path) == "torchrun --nproc-per-node 8 recipes/a.py --resume"
    write_command(tmp_path, ["vlmrl", "train", "recipes/a.py"])
    monkeypatch.chdir("/")
    assert (
        resume_command(tmp_path) == f"cd {tmp_path} && torchrun --nproc-per-node 8 -m vlmrl train recipes/a.py --resume"
    )
    assert resume_command(tmp_path / "none") is None


def small(folder: Path, **changes) -> Config:
    config = short_quickstart(folder, checkpoint=Checkpoint(every=1))
    config = replace(config, warm_start=WarmStart(), eval=Eval(), save_model=False)
    return replace(config, train=replace(config.train, steps=1, groups_per_batch=2), **changes)


def test_what_was_stopped_before_a_step_has_nothing_to_continue(tmp_path):
    checkpoints = SimpleNamespace(newest=lambda: None)
    run = SimpleNamespace(folder=tmp_path, checkpoints=checkpoints, config=Config(**DATA))
    assert program._how_to_continue(run) == "nothing was saved yet"
    (tmp_path / "model").mkdir()  # as after a warm start
    assert program._how_to_continue(run) == f"the model so far is in {tmp_path / 'model'}"
    (tmp_path / "metrics.jsonl").write_text(ROW)
    assert "the results so far are in" in program._how_to_continue(run)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("run.json must be a JSON object", []),
        *((f"{name} must be", {key: value for key, value in SAVED.items() if key != name}) for name in SAVED),
        *((f"{name} must be", SAVED | {name: []}) for name in SAVED),
        ("stage must be one of", SAVED | {"stage": "rl"}),
        ("step must be 0 or more", SAVED | {"step": -1}),
        ("log.metrics.jsonl must be 0 or more", SAVED | {"log": {"metrics.jsonl": -5}}),
        ("without fields that vlmrl does not know", SAVED | {"steps": 3}),
        ("batches.tasks must be", SAVED | {"batches": {}}),
        ("batches.tasks must be", SAVED | {"batches": {"tasks": {"drawn": 3}}}),
        ("batches.started must be", SAVED | {"batches": SAVED["batches"] | {"started": "4"}}),
        ("batches.unfinished must be", SAVED | {"batches": SAVED["batches"] | {"unfinished": {"x": 3}}}),
        ("batches.failed must be", SAVED | {"stage": "warm_start"}),
        ("batches.bad_rows must be", SAVED | {"stage": "sft"}),
    ],
)
def test_an_edited_state_is_one_error_that_names_the_field(field, values, tmp_path):
    for optional in ("best", "contents"):
        if field == f"{optional} must be" and optional not in values:
            values = SAVED | {optional: 3 if optional == "contents" else "high"}  # without it there is none
    (tmp_path / "run.json").write_text(json.dumps(values))
    for read in (LoopState.load, lambda path: check_resume(Config(**DATA), path)):
        with pytest.raises(ValueError, match=rf"checkpoint {tmp_path} cannot be read: .*{field}.* delete this one"):
            read(tmp_path)


def test_edited_records_of_a_run_are_no_bare_errors(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"groups/trained": 4}\n{"step": "two", "groups/trained": 4}\n' + ROW)
    assert trained_steps(tmp_path / "x") == 120
    (tmp_path / "best").mkdir()
    for text in ("[]", "{}", '{"reward": "high"}', "{"):
        (tmp_path / "best/best.json").write_text(text)
        assert best_reward(tmp_path, 0.5) == 0.5 and best_reward(tmp_path, None) is None


def test_a_run_is_complete_when_all_that_comes_after_its_last_step_is_written(tmp_path):
    config = Config(**DATA, output_dir=str(tmp_path), name="x", train=Train(steps=2))
    checkpoint = tmp_path / "x/checkpoints/step000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text(json.dumps(SAVED | {"step": 2}))
    assert not has_finished(config, checkpoint, True)
    (tmp_path / "x/model").mkdir()
    (tmp_path / "x/model/config.json").touch()
    (tmp_path / "x/summary.json").write_text('{"reward_before": 0.5}')
    assert not has_finished(config, checkpoint, True) and has_finished(config, checkpoint, False)
    (tmp_path / "x/summary.json").write_text('{"reward_after": 0.5}')
    assert has_finished(config, checkpoint, True)
    assert not has_finished(replace(config, train=Train(steps=3)), checkpoint, True)
    adapted = replace(config, model=replace(config.model, lora=Lora(rank=2)))
    assert not has_finished(adapted, checkpoint, True)
    (tmp_path / "x/adapters").mkdir()
    (tmp_path / "x/adapters/adapter_config.json").touch()
    assert has_finished(adapted, checkpoint, True)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_copy_or_a_clock_that_goes_back_does_not_change_which_weights_are_the_newest(tmp_path, hours):
    """A run was finished, and goes on. What it wrote before is dated after that, or what it writes after is dated before."""
    config = Config(**DATA, output_dir=str(tmp_path), name="x", train=Train(steps=2))
    folder = config.folder
    weights = SimpleNamespace(is_on_meta=False, save=lambda part, _: (part / "config.json").touch())
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    run = SimpleNamespace(folder=folder, config=config, checkpoints=checkpoints, model=weights, colocated=False)
    trainer, state = SimpleNamespace(save=lambda part: None), LoopState(**SAVED | {"step": 1})

    def save_all():
        save_summary(run, state)
        asyncio.run(save_model(run, trainer))

    def date(*files):
        for file in files:
            os.utime(file, (time.time() + hours * 3600,) * 2)

    folder.mkdir()
    save_all()
    assert newest_weights(folder) == folder / "model"
    write_checkpoint(run, trainer, state)
    save_all()
    assert newest_weights(folder) == folder / "model"
    state.step = 2
    write_checkpoint(run, trainer, state)
    checkpoint = checkpoints.newest()
    date(*[folder / "model/config.json", folder / "summary.json"] if hours > 0 else [checkpoint / "run.json"])
    assert newest_weights(folder) == checkpoint and not has_finished(config, checkpoint, False)
    save_all()
    date(*[checkpoint / "run.json"] if hours > 0 else [folder / "model/config.json", folder / "summary.json"])
    assert newest_weights(folder) == folder / "model" and has_finished(config, checkpoint, False)
    shutil.rmtree(checkpoint)  # to free its space: the model is still newer than the one before
    assert newest_weights(folder) == folder / "model"


@pytest.mark.slow
def test_a_refused_resume_changes_no_byte(tmp_path, capsys):
    config = small(tmp_path)
    run_training(config)
    before = files(config.folder)
    longer = replace(config, train=replace(config.train, steps=2))
    refusals = {
        "made by another model": replace(longer, model=Model(path="tiny:qwen3")),
        "other trained parts": replace(longer, model=replace(config.model, freeze=("vision_tower",))),
        "reference/": replace(longer, algo=replace(config.algo, kl_coef=0.1)),
        "report.to": replace(longer, report=Report(to=("none",))),
    }
    for reason, other in refusals.items():
        with pytest.raises(ValueError, match=reason):
            run_training(other, resume=True)
        assert files(config.folder) == before, reason
    checkpoint = config.folder / "checkpoints/step000001"
    for name, damage in itertools.product(
        ("run.json", "trainer/.metadata", "trainer/__0_0.distcp", "random0.pt", "randomdriver.pt"), (Path.unlink, cut)
    ):
        content = (checkpoint / name).read_bytes()
        damage(checkpoint / name)
        damaged = files(config.folder)
        with pytest.raises(ValueError, match=r"checkpoint .*/step000001 cannot be read: .* delete this one"):
            run_training(longer, resume=True)
        assert files(config.folder) == damaged, name
        (checkpoint / name).write_bytes(content)
    log = config.folder / "trajectories.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    (config.folder / "metrics.jsonl").open("a").write("{}\n")  # this file alone would be cut
    before = files(config.folder)
    with pytest.raises(ValueError, match=r"trajectories\.jsonl has"):
        run_training(longer, resume=True)
    assert files(config.folder) == before
    capsys.readouterr()


@pytest.mark.slow
def test_a_damaged_record_costs_a_run_its_page_and_not_its_summary(tmp_path, capsys):
    config = small(tmp_path)
    run_training(config)
    log = config.folder / "trajectories.jsonl"
    log.write_bytes(b"x" + log.read_bytes()[1:])
    (config.folder / "summary.json").unlink()
    run_training(replace(config, train=replace(config.train, steps=2)), resume=True)
    assert "page could not be written" in capsys.readouterr().out and (config.folder / "summary.json").exists()


class NoAccount(Tracker):
    """Writes a file, and does not start."""

    remedy = "Set OFFLINE=1."

    def __init__(self, folder: Path, config: dict[str, object]) -> None:
        (folder / "toy.txt").touch()
        raise RuntimeError("no account")


@pytest.mark.slow
def test_a_tracker_that_does_not_start_changes_no_byte(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "toy", NoAccount)
    config = small(tmp_path, report=Report(to=("toy",)))
    config.folder.mkdir(parents=True)
    (config.folder / "metrics.jsonl").write_text(ROW)
    with pytest.raises(ValueError, match=r"report\.to toy did not start: no account. Set OFFLINE=1\."):
        run_training(config)
    assert files(config.folder) == {"metrics.jsonl": ROW.encode()}
    assert not config.folder.with_name("quickstart.1").exists() and "earlier" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_write_to_a_place_that_refuses_it_is_one_line(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(OutputError, match=r"runs/\.models cannot be written: Not a directory.*set output_dir"):
        run_training(small(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.json", "step000001", "model"])
def test_a_disk_that_becomes_full_leaves_no_half_file(file, tmp_path, monkeypatch):
    config = replace(small(tmp_path), save_model=True)
    flush = os.fsync
    replace_file = Path.replace

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_at(handle: int) -> None:
        if f"/.{file}.part" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            full()
        flush(handle)

    monkeypatch.setattr(os, "fsync", full_at)
    if file == "config.json":
        monkeypatch.setattr(
            Path, "replace", lambda self, target: full() if target.name == file else replace_file(self, target)
        )
    with pytest.raises(OutputError, match=f"{file}.* cannot be written: No space left on device.*set output_dir"):
        run_training(config)
    left = [path for path in config.folder.rglob("*") if ".part" in path.name]
    assert not left and not list(config.folder.rglob(file))


@pytest.mark.slow
def test_adapters_are_not_resumed_with_another_scale(tmp_path):
    """The policy would be another one than was trained, and so would an export of the earlier checkpoints."""
    config = short_quickstart(tmp_path, checkpoint=Checkpoint(every=1), save_model=False)
    model = replace(config.model, lora=Lora(rank=2))
    steps = replace(config.train, steps=1, groups_per_batch=2)
    config = replace(config, model=model, warm_start=WarmStart(), eval=Eval(), train=steps)
    run_training(config)
    before, more = files(config.folder), replace(steps, steps=2)
    other = replace(config, model=replace(model, lora=Lora(rank=2, alpha=64)), train=more)
    with pytest.raises(ValueError, match=r"model\.lora\.alpha must be 32, as until .*step000001, but it is 64"):
        run_training(other, resume=True)
    assert files(config.folder) == before


def test_a_moved_folder_is_no_changed_setting(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(plain(Config(output_dir="runs"))))
    assert describe_changes(tmp_path, Config(output_dir=str(tmp_path.parent))) == []
    assert describe_changes(tmp_path, Config(output_dir="runs", seed=3)) == ["          seed is now 3, and was 0"]
