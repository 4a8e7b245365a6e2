"""What a run that was ended by an error leaves."""

import json

import pytest
from testing.run_folders import write_run_folder

from vlmrl.config import Config, Optim
from vlmrl.report.crash import changed_from_defaults, crash_report

CONFIG = Config(name="shapes", optim=Optim(lr=3e-4))


class StoppedError(Exception):
    pass


def crash(folder, error):
    said = []
    with pytest.raises(type(error)), crash_report(folder, CONFIG, said.append, StoppedError):
        raise error
    return said


def sections(folder):
    parts = (folder / "crash.txt").read_text().split("\n== ")[1:]
    return {title: text.strip() for title, text in (part.split(" ==\n", 1) for part in parts)}


def test_a_crash_leaves_the_error_the_settings_the_versions_the_metrics_and_the_trajectory_it_names(tmp_path):
    folder = write_run_folder(tmp_path / "shapes", steps=2)
    said = crash(folder, ValueError("trajectory step000002/00001/02, turn 1: 5 placeholders, but 4 tokens"))
    assert said == [f"crash report: {folder / 'crash.txt'}"]
    found = sections(folder)
    assert "Traceback" in found["error"]
    assert found["error"].endswith("ValueError: trajectory step000002/00001/02, turn 1: 5 placeholders, but 4 tokens")
    assert found["settings that differ from the defaults"] == (
        "name = 'shapes' (default 'run')\noptim.lr = 0.0003 (default 1e-06)"
    )
    assert "torch" in json.loads(found["versions"])["versions"]
    assert json.loads(found["last metrics"])["step"] == 2
    assert json.loads(found["trajectories"])["id"] == "step000002/00001/02"


def test_an_error_that_names_no_trajectory_shows_those_that_failed_last(tmp_path):
    folder = write_run_folder(tmp_path / "shapes", steps=2)
    crash(folder, RuntimeError("too many trajectories failed"))
    failed = json.loads(sections(folder)["trajectories"])
    assert (failed["step"], failed["reason"][:12]) == (2, "TimeoutError")


def test_a_run_that_has_logged_nothing_has_a_report_too(tmp_path):
    crash(tmp_path, OSError("no GPU"))
    assert sections(tmp_path)["last metrics"] == "none were logged"


def test_a_report_has_texts_of_others_with_escapes(tmp_path):
    """With half of a surrogate pair there was no report at all."""
    crash(tmp_path, OSError("a server says \x1b[2J\ud800"))
    assert sections(tmp_path)["error"].endswith(r"OSError: a server says \x1b[2J\ud800")


def test_a_stop_is_no_crash_and_an_earlier_report_is_removed(tmp_path):
    (tmp_path / "crash.txt").write_text("of yesterday")
    for error in (StoppedError(), KeyboardInterrupt()):
        assert crash(tmp_path, error) == []
        assert not (tmp_path / "crash.txt").exists()


def test_a_disk_that_is_full_keeps_the_error(tmp_path):
    assert crash(tmp_path / "missing", ValueError("the real one")) == []


def test_defaults_are_not_listed():
    assert changed_from_defaults(Config(output_dir="/home/me/runs")) == []
