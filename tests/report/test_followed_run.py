"""A run's folder, read while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testing.run_folders import write_run_folder

from vlmrl.report.run_data import LISTS
from vlmrl.report.viewer.followed_run import FollowedRun, overview, search_text
from vlmrl.report.viewer.page import choose_trajectories, write_snapshot


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_run_folder(tmp_path / "runs/geo3k", steps=2, groups=2, group_size=2)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def follow(run: FollowedRun, response: dict[str, Any]) -> dict[str, Any]:
    """What was appended since ``response``, which had everything."""
    return run.updates(response["generation"], {name: len(response[name]) for name in LISTS})


def test_the_first_response_has_everything_and_later_ones_what_was_appended(folder):
    run = FollowedRun(folder)
    first = run.updates()
    assert first["name"] == "geo3k" and first["config"]["optim"] == {"lr": 1e-4, "weight_decay": 0.0}
    assert [len(first[name]) for name in LISTS] == [4, 14, 2, 2] and not first["more"]
    append(folder / "metrics.jsonl", {"step": 3, "reward/mean": 0.75})
    later = follow(run, first)
    assert later["metrics"] == [{"step": 3, "reward/mean": 0.75}] and later["trajectories"] == []
    assert "config" not in later and later["generation"] == first["generation"]


def test_a_line_that_is_being_written_is_left_for_later(folder):
    run = FollowedRun(folder)
    first = run.updates()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward')
        file.flush()
        assert follow(run, first)["metrics"] == []
        file.write('/mean": 1.0}\n')
    assert follow(run, first)["metrics"] == [{"step": 3, "reward/mean": 1.0}]


def test_after_a_resume_that_cut_the_files_everything_is_sent_again(folder):
    run = FollowedRun(folder)
    first = run.updates()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    other = {"step": 2, "reward/mean": 0.125}
    (folder / "metrics.jsonl").write_text(lines[0] + json.dumps(other) + "\n" + " " * 5000)
    again = follow(run, first)
    assert again["generation"] != first["generation"] and len(again["trajectories"]) == 14
    assert [row["reward/mean"] for row in again["metrics"]] == [first["metrics"][0]["reward/mean"], 0.125]


def test_a_long_run_is_sent_in_parts(folder):
    run = FollowedRun(folder)
    first = run.updates(most=10)
    assert first["more"] and len(first["trajectories"]) == 10
    rest = follow(run, first)
    assert not rest["more"] and [row["n"] for row in rest["trajectories"]] == [10, 11, 12, 13]


def test_a_record_is_read_again_from_its_line(folder):
    run = FollowedRun(folder)
    for row in run.updates()["trajectories"]:
        record = run.record(row["n"])
        assert (record["id"], record["step"], record["kind"]) == (row["id"], row["step"], row["kind"])
    with pytest.raises(IndexError):
        run.record(14)


def test_an_overview_is_what_a_list_shows():
    message = {"role": "user", "parts": [{"image": "3fa9"}, {"text": "Which?" + "x" * 500}]}
    turns = [{"images": ["3fa9"], "sampled_tokens": 7, "messages": [message]}, {"images": [], "sampled_tokens": 5}]
    found = overview({"id": "a/0", "step": 3, "kind": "eval", "reward": 1.0, "turns": turns}, 17)
    assert (found["n"], found["kind"], found["turns"], found["tokens"], found["image"]) == (17, "eval", 2, 12, "3fa9")
    assert found["question"] == "Which?" + "x" * 154
    assert overview({"prompt": "[image]\nHow many?"}, 0)["question"] == "How many?"


def test_a_search_finds_responses_observations_and_errors_in_any_case(folder):
    run = FollowedRun(folder)
    assert run.search("TIMEOUTERROR") == [4, 9]
    assert run.search("timeouterror", step=2) == [9]
    assert run.search("no such text") == []
    asked = iter([False, True])
    assert run.search("timeouterror", ends=lambda: next(asked)) == []  # it reads no more than the first
    assert "higher" in search_text({"turns": [{"text": "5", "observation": "Higher"}]})


@pytest.mark.parametrize("name", ["../metrics", "..", "", "a/b", "/etc/passwd", "%2e%2e", "missing"])
def test_only_images_of_the_run_have_a_path(folder, name):
    (folder / "images/good-1_a.png").write_bytes(b"png")
    (folder / "outside.png").write_bytes(b"png")
    run = FollowedRun(folder)
    assert run.image_path(name) is None and run.image_path("../outside") is None
    assert run.image_path("good-1_a") == folder / "images/good-1_a.png"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"run folder .*/nothing: there is no such folder"):
        FollowedRun(tmp_path / "nothing")


def test_a_run_that_has_only_begun_can_be_followed(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "new"}')
    run = FollowedRun(tmp_path)
    first = run.updates()
    assert all(first[name] == [] for name in LISTS) and first["summary"] == {}
    append(tmp_path / "metrics.jsonl", {"step": 1})
    assert follow(run, first)["metrics"] == [{"step": 1}]


def test_a_file_has_all_of_some_steps_the_last_one_included():
    rows = [{"n": n, "step": n // 10} for n in range(100)]
    assert choose_trajectories(rows, 1000) == list(range(100))
    assert {n // 10 for n in choose_trajectories(rows, 50)} == {1, 3, 5, 7, 9}
    assert choose_trajectories(rows, 4) == [90, 91, 92, 93]
    assert choose_trajectories([], 4) == []


def test_a_snapshot_has_all_runs_and_each_image_once(folder, tmp_path):
    write_snapshot([FollowedRun(folder), FollowedRun(folder)], tmp_path / "page.html", "both")
    text = (tmp_path / "page.html").read_text()
    assert text.count('id="trajectory-0-') == text.count('id="trajectory-1-') == 14
    assert text.count('type="application/json" id="image-') == len(list((folder / "images").iterdir()))
