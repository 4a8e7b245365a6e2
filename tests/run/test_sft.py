"""Supervised stages: they are logged, evaluated, checkpointed and resumed as training is, alone and before it."""

import asyncio
import errno
import json
import shutil
import signal
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console
from testing import sft_tracker
from testing.runs import RECIPES, repeatable, short_quickstart

from vlmrl.config import SFT, Checkpoint, Config, Conversations, Data, Eval, EvalData, Model, Rollout, Train, WarmStart
from vlmrl.config.code import load_object
from vlmrl.data.source import train_and_held_out
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run import loop, sft
from vlmrl.run.build import build_run
from vlmrl.run.program import run_training, summary_of
from vlmrl.run.sft import ConversationSource, Demonstrated
from vlmrl.run.stopping import RunStopped, StopRequest
from vlmrl.train.checkpoint import load_json
from vlmrl.types import Sample

pytestmark = pytest.mark.slow


def task(index: int, seed: int) -> dict:
    return {"prompt": f"Say {index}."}


def reward(text: str, task) -> float:
    return float("a" in text)


def demonstrate(task, turn: int) -> str:
    return f"a{task.id[-1]}"


@pytest.fixture
def rows(tmp_path):
    """Conversations of two turns, with an image in the second."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    found = []
    for number in range(8):
        talk = [("user", f"Say {number}."), ("assistant", f"a{number}"), ("user", "<image>And?"), ("assistant", "red")]
        found.append({"messages": [{"role": role, "content": text} for role, text in talk], "images": ["red.png"]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def config(tmp_path, qwen3_vl, rows):
    return Config(
        name="sft",
        output_dir=str(tmp_path / "runs"),
        model=Model(path=str(qwen3_vl), device="cpu"),
        sft=SFT(data={"rows": Conversations(path=rows, held_out=2, epochs=2.0)}, rows_per_step=4, lr=1e-3),
        train=Train(steps=0),
        checkpoint=Checkpoint(every=1, keep=9),
        deterministic=True,
    )


def with_tasks(config: Config, **changes) -> Config:
    rollout = Rollout(group_size=2, max_tokens=512, max_response_tokens=4)
    train = Train(steps=1, groups_per_batch=1, image_check=False)
    return replace(
        config, data=Data(generator=task, size=8), reward=reward, rollout=rollout, **{"train": train} | changes
    )


def test_a_stage_whose_held_out_rows_are_gone_keeps_the_step_that_was_trained(config, monkeypatch):
    """It is an error outside of the update: without a checkpoint, all steps since the last one were lost."""
    measured, original = [], sft._held_out_loss

    async def fails(*given):
        measured.append(None)
        if len(measured) == 2:
            raise OSError("the rows are gone")
        return await original(*given)

    run_training(replace(config, name="whole"))
    config = replace(config, checkpoint=Checkpoint(every=9), eval=Eval(every=2))
    monkeypatch.setattr(sft, "_held_out_loss", fails)
    with pytest.raises(OSError, match="the rows are gone"):
        run_training(config)
    (saved,) = config.folder.glob("checkpoints/*")
    state = load_json(saved)
    assert (saved.name, state["step"], state["evaluated"]) == ("sft000002", 2, False)
    run_training(config, resume=True)
    assert [row["step"] for row in logged(config) if "sft/loss" in row] == [1, 2, 3]
    assert weights(config) == weights(replace(config, name="whole"))


def test_a_step_that_cannot_be_recorded_is_saved(config, monkeypatch):
    """It was trained: without a checkpoint, all steps since the last one were lost."""
    log = RunLog.log

    def refuse(self, step, metrics):
        if step == 2 and "sft/loss" in metrics:
            raise OSError(errno.EIO, "the disk stumbled")
        log(self, step, metrics)

    run_training(replace(config, name="whole"))
    config = replace(config, checkpoint=Checkpoint(every=9))
    with monkeypatch.context() as patched:
        patched.setattr(RunLog, "log", refuse)
        with pytest.raises(OSError, match="the disk stumbled"):
            run_training(config)
    (saved,) = config.folder.glob("checkpoints/*")
    assert saved.name == "sft000002"
    run_training(config, resume=True)
    assert weights(config) == weights(replace(config, name="whole"))


async def test_a_bad_row_is_not_all_of_the_last_part_of_the_held_out_ones(config, rows, tmp_path):
    """Of 9, 8 a step, it was the only one of its part: more than rollout.max_failed_fraction, which ended the run."""
    lines = [line for line in (tmp_path / "rows.jsonl").read_text().splitlines() for _ in range(2)]
    bad = train_and_held_out(range(len(lines)), 9)[1][-1]
    lines[bad] = lines[bad].replace("red.png", "none.png")
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    data = {"rows": Conversations(path=str(tmp_path / "bad.jsonl"), held_out=9)}
    run = build_run(replace(config, sft=replace(config.sft, data=data, rows_per_step=8)))
    source = ConversationSource(run, RunProgress(Console(quiet=True)))
    parts = [await source.held_out(part) for part in range(3)]
    run.close()
    assert [None if part is None else len(part) for part in parts] == [4, 4, None]


def test_the_plan_names_the_steps_of_all_epochs_and_what_is_not_read(config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(json.loads(line) | {"note": "x"}) + "\n" for line in rows.open()))
    run = build_run(config)
    run.engine.close()
    summary = summary_of(run)
    assert "6 conversations, 2 held out; 3 steps of 4, lr 0.001\n          rows: not read: columns note\n" in summary


@pytest.mark.parametrize(("epochs", "rows_per_step", "sizes"), [(1.0, 4, [3, 3]), (1.0, 64, [6]), (0.5, 2, [1, 2])])
async def test_each_row_is_trained_as_often_as_its_dataset_has_epochs(config, epochs, rows_per_step, sizes):
    """Also where the rows do not fill the last step."""
    data = {name: replace(each, epochs=epochs) for name, each in config.sft.data.items()}
    run = build_run(replace(config, sft=replace(config.sft, data=data, rows_per_step=rows_per_step)))
    source = ConversationSource(run, RunProgress(Console(quiet=True)))
    assert source.steps == len(sizes)
    taken = [[sample.token_ids for sample in await source.take(step)] for step in range(1, source.steps + 1)]
    assert [len(step) for step in taken] == sizes
    assert len({tuple(row) for step in taken for row in step}) == sum(sizes)
    run.close()


def logged(config: Config) -> list[dict]:
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [repeatable(json.loads(line)) for line in lines]


def weights(config: Config) -> bytes:
    return (config.folder / "model/model.safetensors").read_bytes()


def test_conversations_alone_are_learned_and_a_resumed_run_is_equal_to_the_bit(config):
    run_training(config)
    rows = logged(config)
    assert [row["step"] for row in rows if "sft/loss" in row] == [1, 2, 3]  # 6 rows twice, 4 a step
    held_out = [row["sft/held_out_loss"] for row in rows if "sft/held_out_loss" in row]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    checkpoints = config.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["sft000001", "sft000002", "sft000003"]
    whole = weights(config)
    shutil.rmtree(checkpoints / "sft000003")
    shutil.rmtree(checkpoints / "sft000002")
    run_training(config, resume=True)
    assert logged(config) == rows and weights(config) == whole


def test_bad_rows_are_counted_and_too_many_of_them_end_the_run(config, rows, tmp_path, capsys):
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace("red.png", "none.png")
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    data = {"rows": Conversations(path=str(tmp_path / "bad.jsonl"), epochs=2.0)}
    some = replace(config, sft=replace(config.sft, data=data, rows_per_step=8), save_model=False)
    run_training(some)
    assert logged(some)[-1]["sft/bad_rows/images"] == 2.0
    output = capsys.readouterr().out
    assert "sft000001: 1 of 8 rows are left out (1 images)" in output
    assert output.count("no image 'none.png'") == 1  # not in each epoch
    with pytest.raises(ValueError, match=r"more than rollout.max_failed_fraction \(0.1\)") as error:
        run_training(replace(some, rollout=replace(some.rollout, max_failed_fraction=0.1)))
    assert "row 0 of" in str(error.value) and "no image 'none.png'" in str(error.value)


def test_a_step_whose_rows_are_all_bad_takes_no_optimizer_step_and_the_schedule_goes_on(config, rows, tmp_path):
    good = (tmp_path / "rows.jsonl").read_text().splitlines()[:4]
    broken = [line.replace("red.png", "none.png") for line in good]
    rates = {}
    for name, lines in ("good", good), ("bad", [broken[0], *good[1:3], broken[3]]):  # the last one is held out
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        data = {"rows": Conversations(path=str(tmp_path / f"{name}.jsonl"), epochs=1.0, held_out=1)}
        sft, optim = replace(config.sft, data=data, rows_per_step=1), replace(config.optim, schedule="linear")
        run = replace(config, name=name, sft=sft, optim=optim, rollout=replace(config.rollout, max_failed_fraction=1.0))
        run_training(run)
        rates[name] = {row["step"]: row.get("sft/lr") for row in logged(run)}
    del rates["good"][0]  # of the held-out loss, which needs a row
    assert len(set(rates["good"].values())) == 3
    left_out = [step for step, rate in rates["bad"].items() if rate is None]
    assert len(left_out) == 1 and rates["bad"] == rates["good"] | {left_out[0]: None}


def test_a_warm_start_that_is_stopped_goes_on_where_it_was_and_training_follows(config, monkeypatch):
    warm = WarmStart(demonstrate=demonstrate, steps=3, trajectories_per_step=2)
    held_out = Eval(data=EvalData(generator=task, size=2, seed=1))
    every = with_tasks(config, warm_start=warm, eval=held_out)
    whole = replace(every, name="whole", report=replace(config.report, to=(f"{sft_tracker.__file__}:Steps",)))
    run_training(whole)
    steps = json.loads((whole.folder / "steps.json").read_text())
    assert steps == sorted(steps) and steps[-1] == 7  # three of warm start, three of fine-tuning, one of training
    names = [path.name for path in (whole.folder / "checkpoints").iterdir()]
    assert sorted(names) == [
        *(f"sft00000{n}" for n in (1, 2, 3)),
        "step000001",
        *(f"warm_start00000{n}" for n in (1, 2, 3)),
    ]
    assert json.loads((whole.folder / "summary.json").read_text()).keys() >= {"reward_before", "reward_after"}

    off = replace(every, checkpoint=Checkpoint(every=9))  # the stop alone saves
    stop, run = StopRequest(), build_run(off)
    log = RunLog(run.folder)
    original = log.log

    def stop_at_the_second_step(step, values):
        original(step, values)
        if step == 2:
            stop.request(signal.SIGTERM)

    monkeypatch.setattr(log, "log", stop_at_the_second_step)
    with pytest.raises(RunStopped):
        asyncio.run(loop.train(run, log, RunProgress(Console(quiet=True)), None, stop))
    log.close()
    (saved,) = (run.folder / "checkpoints").iterdir()
    state = load_json(saved)
    assert (saved.name, state["stage"], state["step"]) == ("warm_start000002", "warm_start", 2)
    run_training(every, resume=True)
    assert logged(every) == logged(whole) and weights(every) == weights(whole)


@pytest.mark.parametrize("last", [2, 3])
def test_a_stop_while_the_loss_is_measured_saves_the_step_that_was_trained(config, monkeypatch, last):
    """Saved as the step before it, its rows would be trained on twice."""
    config = replace(config, eval=Eval(every=1))
    whole, stopped = (
        replace(config, name=name, checkpoint=Checkpoint(every=every)) for name, every in (("a", 1), ("b", 9))
    )
    run_training(whole)
    stop, run, original = StopRequest(), build_run(stopped), ConversationSource.held_out
    log, parts = RunLog(run.folder), []

    async def stopped_at_the_last_step(source, part):
        parts.append(part)
        if parts.count(0) == last + 1:  # the first time is before any step
            stop.request(signal.SIGTERM)
        return await original(source, part)

    monkeypatch.setattr(ConversationSource, "held_out", stopped_at_the_last_step)
    with pytest.raises(RunStopped):
        asyncio.run(loop.train(run, log, RunProgress(Console(quiet=True)), None, stop))
    log.close()
    monkeypatch.undo()
    state = load_json(max((run.folder / "checkpoints").iterdir()))
    assert (state["step"], state["evaluated"]) == (last, False)
    run_training(stopped, resume=True)
    rows = [{} for _ in range(4)]
    for row in logged(stopped):
        rows[row["step"]] |= row
    assert rows == logged(whole) and weights(stopped) == weights(whole)


def test_a_stage_that_was_turned_off_cannot_be_resumed(config):
    run_training(replace(config, save_model=False))
    with pytest.raises(ValueError, match=r"sft\.data must be set to resume from .*sft000003, .*: repeat the options"):
        run_training(with_tasks(config, sft=SFT()), resume=True)


def test_the_rows_of_a_step_stay_over_a_resume(config):
    """The position is counted in steps: with 8 rows a step, the 2 steps of 4 would have been all."""
    run_training(replace(config, save_model=False))
    shutil.rmtree(config.folder / "checkpoints/sft000003")
    before = (config.folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"sft\.rows_per_step must be 4, as until .*sft000002, but it is 8"):
        run_training(replace(config, sft=replace(config.sft, rows_per_step=8)), resume=True)
    assert (config.folder / "config.json").read_bytes() == before


def content(sample: Sample) -> tuple:
    return sample.token_ids, len(sample.prompt_token_ids), sample.loss_mask, sample.image_ids


async def test_recorded_episodes_are_the_samples_that_the_warm_start_trains_on(tmp_path, monkeypatch):
    """The quickstart's scripted episodes, recorded by datasets/zoom_episodes.py, with images in two turns."""
    monkeypatch.chdir(tmp_path)
    recorder = load_object(f"{RECIPES.parent / 'datasets/zoom_episodes.py'}:main")
    out = tmp_path / "episodes"
    await asyncio.to_thread(recorder, out, 3)
    sft = SFT(data={"zooms": Conversations(path=str(out))}, rows_per_step=3)
    config = short_quickstart(tmp_path, sft=sft)
    run = build_run(replace(config, warm_start=replace(config.warm_start, trajectories_per_step=32)))
    source, recorded = (kind(run, RunProgress(Console(quiet=True))) for kind in (Demonstrated, ConversationSource))
    wanted = [content(sample) for sample in await source.take(1)]
    found = [content(sample) for sample in await recorded.take(1)]
    assert len(found) == 3 and all(row in wanted for row in found)
    source.close()
    run.close()
