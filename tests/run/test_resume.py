"""A run resumes in its folder. `test_drill.py` compares its numbers with those of one that was not ended."""

import json
from dataclasses import replace

import pytest
from testing.runs import short_quickstart

from vlmrl.config import Checkpoint, Eval, WarmStart
from vlmrl.run.program import run_training


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
