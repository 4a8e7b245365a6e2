"""A run resumes in its folder. `test_drill.py` compares its numbers with those of one that was not ended."""

import json
from dataclasses import replace

import pytest
from PIL import Image
from testing.runs import short_quickstart

from vlmrl import Config, Data, Model, Rollout, Train
from vlmrl.config import Checkpoint, Eval, WarmStart
from vlmrl.report.run_log import read_rows
from vlmrl.run.program import run_training
from vlmrl.run.stopping import StopRequest


@pytest.mark.slow
def test_without_a_checkpoint_a_resumed_run_starts_over(tmp_path, capsys):
    config = short_quickstart(tmp_path, checkpoint=Checkpoint(every=1), save_model=False)
    config = replace(config, warm_start=WarmStart(), eval=Eval())
    config = replace(config, train=replace(config.train, steps=1, groups_per_batch=2))
    run_training(config, resume=True)
    assert "resumed" not in capsys.readouterr().out
    run_training(replace(config, train=replace(config.train, steps=2)), resume=True)
    assert "train.steps is now 2, and was 1" in capsys.readouterr().out
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    run_training(replace(config, train=replace(config.train, steps=2)), resume=True)
    said = capsys.readouterr().out
    assert "nothing is left to train: the run has 2 of 2 steps; raise train.steps" in said and "resumed" not in said


def tasks(index, seed):
    return {"prompt": "Say something.", "images": [Image.new("RGB", (32, 32), (index % 256, 0, 0))]}


def length(text, task):
    return len(text) / 100


def evaluated(folder, evaluation):
    return Config(
        name="say",
        output_dir=str(folder),
        model=Model(path="tiny:qwen3_vl", device="cpu"),
        data=Data(generator=tasks, size=16, held_out=2),
        reward=length,
        rollout=Rollout(group_size=2, max_turns=1, max_response_tokens=4, max_tokens=128),
        eval=evaluation,
        checkpoint=Checkpoint(every=1),
        train=Train(steps=2, groups_per_batch=1),
    )


@pytest.mark.slow
def test_a_run_that_gets_more_steps_keeps_the_evaluations_of_its_last_one(tmp_path):
    """They come after the checkpoint of the last step, and are not repeated: their rows and trajectories were removed."""
    config = evaluated(tmp_path, Eval(blank_images=True))
    run_training(config)
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        with (config.folder / name).open("ab") as file:
            file.write(b"\0\0\n")  # of a step that was not finished when the machine lost power
    run_training(replace(config, train=replace(config.train, steps=3)), resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    kinds = [next((kind for kind in ("eval", "blanked") if f"{kind}/tasks" in row), "train") for row in rows]
    steps = [(row["step"], kind) for row, kind in zip(rows, kinds, strict=True)]
    first = [(0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (2, "blanked")]
    assert steps == [*first, (3, "train"), (3, "eval"), (3, "blanked")]
    played = [(row["step"], row["kind"]) for row in read_rows(config.folder / "trajectories.jsonl")]
    assert played == [step for step in steps for _ in range(2)]


@pytest.mark.slow
def test_those_evaluations_also_stay_if_the_longer_run_is_killed_before_its_first_checkpoint(tmp_path):
    """The killed run has written its settings, with more steps, and rows of its first one."""
    config = evaluated(tmp_path, Eval())
    run_training(config)
    longer = replace(config, train=replace(config.train, steps=3))

    def end(row):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run_training(longer, resume=True, stop=StopRequest(), on_row=end)
    assert [row["step"] for row in read_rows(config.folder / "metrics.jsonl")] == [0, 1, 2, 2, 3]
    assert not (config.folder / "checkpoints" / "step000003").exists()
    run_training(longer, resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/tasks" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "eval/tasks" not in row] == [1, 2, 3]
    played = read_rows(config.folder / "trajectories.jsonl")
    assert [row["step"] for row in played if row["kind"] == "eval"] == [0, 0, 2, 2, 3, 3]
    assert [row["step"] for row in played if row["kind"] == "train"] == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
def test_a_run_that_ended_early_and_goes_on_has_each_evaluation_once(tmp_path):
    config = evaluated(tmp_path, Eval(every=1))
    stop = StopRequest()
    stop.early = True
    run_training(config, stop=stop)
    run_training(config, resume=True)
    rows = read_rows(config.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/tasks" in row] == [0, 1, 2]


@pytest.mark.slow
def test_a_resumed_run_says_that_a_datasets_rows_are_others(tmp_path, capsys):
    """The numbers of rows decide which are held out: some that had been trained on were evaluated, without a word."""
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"Say {number}.", "answer": str(number)}) + "\n" for number in range(12)]
    path.write_text("".join(rows))
    config = evaluated(tmp_path, Eval())
    config = replace(config, model=Model(path="tiny:qwen3", device="cpu"), data=Data(path=str(path), held_out=4))

    def said(steps):
        run_training(replace(config, train=replace(config.train, steps=steps)), resume=True)
        return capsys.readouterr().out

    said(1)
    assert "of data are others" not in said(2)
    path.write_text("".join(rows[1:]))
    assert "the rows of data are others: 7 rows, of content " in (changed := said(3))
    assert changed.count("held-out data are others: 4 rows") == 1 and "cannot be compared" in changed
    assert "are others" not in said(4)
