"""The curve and the page of a run are written when it ends."""

import asyncio
from types import SimpleNamespace

import pytest

from vlmrl.config import Config
from vlmrl.report.progress import RunProgress
from vlmrl.report.run_log import RunLog
from vlmrl.run.recorder import Recorder


@pytest.mark.parametrize(
    ("rows", "files"),
    [
        ([], []),
        ([{"sft/loss": 2.0}], ["trajectories.html"]),
        ([{"eval/reward/mean": 0.5, "eval/standard_error": 0.1}], ["reward.png", "trajectories.html"]),
    ],
)
def test_a_run_that_logged_something_has_a_page_and_one_with_rewards_a_curve(tmp_path, rows, files):
    config = Config(name=tmp_path.name, output_dir=tmp_path.parent)
    run = SimpleNamespace(config=config, model=SimpleNamespace(renderer=SimpleNamespace(decode=None)))
    with RunLog(tmp_path) as log:
        for step, row in enumerate(rows):
            log.log(step, row)
        asyncio.run(Recorder(run, log, RunProgress()).finish())
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl") == files
