"""The files of a run folder: rows, truncation on resume, the config."""

import json
import math
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from vlmrl.report.run_log import RunLog, read_rows
from vlmrl.types import Task


def test_rows_are_one_json_object_a_line_with_step_and_time(tmp_path):
    with RunLog(tmp_path / "run") as log:
        log.log(1, {"reward/mean": 0.25, "kl": None, "note": "warm"})
        log.log(2, {"tokens": np.int64(3), "loss": np.float32(0.5)})
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()  # already there: every row is flushed
    first, second = map(json.loads, lines)
    assert first.pop("time") > 1.7e9
    assert first == {"step": 1, "reward/mean": 0.25, "kl": None, "note": "warm"}
    assert (second["tokens"], second["loss"]) == (3, 0.5)


@pytest.mark.parametrize("value", [{"a": 1}, [1.0], (1,), math.nan, math.inf, np.zeros(2), object()])
def test_a_value_that_is_not_a_finite_number_is_an_error_naming_the_key(tmp_path, value):
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match="'loss/parts'"):
        log.log(1, {"fine": 1.0, "loss/parts": value})
    assert log.rows() == []


def test_a_metric_cannot_take_the_name_of_the_step(tmp_path):
    with pytest.raises(ValueError, match="'step'"):
        RunLog(tmp_path).log(1, {"step": 2})


def test_a_resumed_run_continues_where_the_checkpoint_was_made(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {"a": 1})
        log.append("trajectories.jsonl", [{"step": 1}])
        sizes = log.sizes()
        log.log(2, {"a": 2})
        log.append("trajectories.jsonl", [{"step": 2}])
    with RunLog(tmp_path, sizes) as log:
        log.log(2, {"a": 20})
        assert [(row["step"], row["a"]) for row in log.rows()] == [(1, 1), (2, 20)]
    assert [row["step"] for row in read_rows(tmp_path / "trajectories.jsonl")] == [1]


def test_rows_go_on_in_the_file_that_has_the_name(tmp_path):
    metrics = tmp_path / "run/metrics.jsonl"
    with RunLog(tmp_path / "run") as log:
        log.log(1, {})
        edited = metrics.with_name("edited")
        edited.write_bytes(metrics.read_bytes())
        edited.replace(metrics)  # as editors save
        log.log(2, {})
        assert log.sizes()["metrics.jsonl"] == metrics.stat().st_size
        assert [row["step"] for row in read_rows(metrics)] == [1, 2]
        metrics.write_bytes(metrics.read_bytes()[:-1])  # an editor that leaves out the last newline
        log.log(2, {})
        assert [row["step"] for row in read_rows(metrics)] == [1, 2, 2]
        metrics.unlink()  # for free space
        log.log(3, {})
        assert [row["step"] for row in read_rows(metrics)] == [3]
        metrics.unlink()
        metrics.mkdir()
        with pytest.raises(OSError, match="cannot be written: Is a directory"):
            log.log(4, {})
        metrics.rmdir()
        log.log(3, {})
        metrics.parent.rename(tmp_path / "moved")
        log.log(4, {})
        metrics.parent.mkdir()  # as another run of the name does, where there are no locks
        log.log(5, {})
        assert not metrics.exists()
    assert [row["step"] for row in read_rows(tmp_path / "moved/metrics.jsonl")] == [3, 4, 5]


def test_rows_go_on_in_a_folder_that_was_moved_to_another_disk_with_a_link_in_its_place(tmp_path):
    folder, disk = tmp_path / "run", tmp_path / "disk"
    with RunLog(folder) as log:
        log.log(1, {})
        shutil.copytree(folder, disk)  # as `mv` does between two disks
        shutil.rmtree(folder)
        folder.symlink_to(disk)
        log.log(2, {})
        log.append("advisories.jsonl", [{"step": 2}])
        assert log.sizes()["metrics.jsonl"] == (disk / "metrics.jsonl").stat().st_size
        assert [row["step"] for row in log.rows()] == [1, 2]
        folder.unlink()
        shutil.rmtree(disk)
        log.log(3, {})
        assert [row["step"] for row in log.rows()] == [3]


def test_no_row_goes_to_a_later_run_that_has_the_name_of_the_folder(tmp_path):
    """As the earlier run's rows go on in its renamed folder, which is deleted then."""
    folder = tmp_path / "run"
    with RunLog(folder) as log:
        log.log(1, {"reward/mean": 0.5})
        folder.rename(tmp_path / "run.1")
        with RunLog(folder) as later:
            later.log(1, {"reward/mean": 0.25})
            shutil.rmtree(tmp_path / "run.1")
            log.log(2, {})
            later.log(2, {})
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2]


def test_a_file_that_is_first_written_after_its_folder_was_moved_is_in_a_new_folder(tmp_path):
    with RunLog(tmp_path / "run") as log:
        log.log(1, {})
        (tmp_path / "run").rename(tmp_path / "moved")
        log.append("advisories.jsonl", [{"step": 1}])
        log.log(2, {})
    assert [row["step"] for row in read_rows(tmp_path / "run/advisories.jsonl")] == [1]
    assert [row["step"] for row in read_rows(tmp_path / "moved/metrics.jsonl")] == [1, 2]


def test_a_folder_that_holds_a_run_is_an_error_unless_resumed_or_emptied(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {})
    with pytest.raises(ValueError, match="holds a run already"):
        RunLog(tmp_path)
    assert RunLog(tmp_path, sizes={}).rows() == []


def test_a_file_shorter_than_at_the_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"metrics.jsonl has 0 bytes, but had 9 when the checkpoint was made"):
        RunLog(tmp_path, {"metrics.jsonl": 9})


def test_a_file_whose_lines_were_changed_since_the_checkpoint_is_refused(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {"a": 1})
        sizes = log.sizes()
    changed = '{"step": 1}\n' + '{"step": 2, "note": "' + 100 * "a" + '"}\n'
    (tmp_path / "metrics.jsonl").write_text(changed)
    with pytest.raises(ValueError, match=r"metrics.jsonl was changed: byte \d+, .* ends no line"):
        RunLog(tmp_path, sizes)
    assert (tmp_path / "metrics.jsonl").read_text() == changed


def test_an_incomplete_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_rows(tmp_path / "none.jsonl") == []


def test_no_half_line_of_a_disk_that_becomes_full_is_left(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(1, {"reward": 0.5})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                log.log(2, {"reward": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        log.log(2, {"reward": 0.75})
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5, 0.75]


def test_the_config_is_written_in_plain_json(tmp_path):
    @dataclass(frozen=True)
    class Optim:
        lr: float = 1e-6
        clip: float = math.inf

    @dataclass(frozen=True)
    class Config:
        out: Path = Path("runs/x")
        env: type = Task
        stops: frozenset[str] = frozenset({"b", "a"})
        optim: Optim = field(default_factory=Optim)

    RunLog(tmp_path).write_config(Config())
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "out": "runs/x",
        "env": "vlmrl.types:Task",
        "stops": ["a", "b"],
        "optim": {"lr": 1e-6, "clip": "inf"},
    }


def test_the_sizes_for_a_checkpoint_are_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("vlmrl.report.run_log.os.fsync", flushed.append)
    with RunLog(tmp_path) as log:
        log.log(1, {"loss": 0.5})
        assert not flushed
        assert log.sizes()["metrics.jsonl"] > 0 and log.sizes()["advisories.jsonl"] == 0
        assert len(flushed) == 1
