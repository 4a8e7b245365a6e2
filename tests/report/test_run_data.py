"""Reading a run's folder: while it grows, after a resume, and what is not there."""

import json
import os

import pytest
from testing.run_folders import write_run_folder

import vlmrl
from vlmrl.report.run_data import RunData


@pytest.fixture
def folder(tmp_path):
    return write_run_folder(tmp_path / "shapes", steps=2, groups=2, group_size=3)


def test_metrics_trajectories_groups_failures_and_advisories_of_a_run(folder):
    run = vlmrl.load_run(folder)
    assert (run.name, run.folder, run.steps, run.config["optim"]["lr"]) == ("shapes", folder, [1, 2], 1e-4)
    assert [row["step"] for row in run.metrics] == [1, 2, 2, 2]
    assert run.summary["reward_after"] == 0.8
    assert [len(run.trajectories(*query)) for query in ((), (1,), (2, "train"), (None, "eval"), (3,))] == [
        20,
        7,
        7,
        3,
        0,
    ]
    assert {name: len(members) for name, members in run.groups(1).items()} == {
        "step000001/00000": 4,
        "step000001/00001": 3,
    }
    assert list(run.groups(2, "blanked")) == ["blanked000002/00000"]
    assert [failure["retried"] for failure in run.failures] == [True, True]
    assert [advisory["setting"] for advisory in run.advisories] == ["rollout.max_response_tokens", "data"]


def test_a_turn_has_messages_tokens_and_images(folder):
    run = vlmrl.load_run(folder)
    turn = run.trajectories(1)[0]["turns"][0]
    (message,) = turn["messages"]
    assert message["parts"] == [{"image": turn["images"][0]}, {"text": "Find the angle <b>A</b>."}]
    columns = [turn[name] for name in ("tokens", "logprobs", "trainer_logprobs", "advantages", "loss_mask")]
    assert {len(column) for column in columns} == {turn["sampled_tokens"]}
    assert run.image(turn["images"][0]).size == (160, 120)


def test_a_trajectory_without_a_kind_is_of_training(folder):
    old = vlmrl.load_run(folder).trajectories(2, "train")
    lines = [json.dumps({name: value for name, value in each.items() if name != "kind"}) + "\n" for each in old]
    (folder / "trajectories.jsonl").write_text("".join(lines))
    assert vlmrl.load_run(folder).trajectories(2, "train") == old


@pytest.mark.parametrize("image_id", ["0" * 64, "../config", "", "a/b"])
def test_an_image_that_was_not_kept_is_a_key_error(folder, image_id):
    with pytest.raises(KeyError, match="was not kept: of each step, those of the first"):
        vlmrl.load_run(folder).image(image_id)


@pytest.mark.parametrize("trajectory_id", ["a" * 256, "a\0b", "../config"])
def test_a_trajectory_whose_id_names_no_file_has_no_log(folder, trajectory_id):
    assert vlmrl.load_run(folder).log_path(trajectory_id) is None


def test_a_trajectory_whose_id_is_a_path_of_megabytes_has_no_log(folder, monkeypatch):
    """Looking for links in one of 650 KB, in somebody else's run, kept a thread of the page for 10 s."""
    run = vlmrl.load_run(folder)
    monkeypatch.setattr("os.path.realpath", lambda *_, **__: pytest.fail("its links are looked for"))
    assert run.log_path("../x/" * 2**17) is None


def test_a_trajectory_whose_id_is_a_path_shows_no_log_from_elsewhere(folder, tmp_path):
    (tmp_path / "auth.log").write_text("somebody logged in")
    assert vlmrl.load_run(folder).log_path(str(tmp_path / "auth")) is None


def test_a_run_that_goes_on_is_read_line_by_line(folder):
    run = vlmrl.load_run(folder)
    assert not run.refresh()
    row, record = json.dumps({"step": 3, "loss": 1.0}), json.dumps(run.trajectories(2)[0] | {"step": 3})
    with (folder / "metrics.jsonl").open("a") as metrics, (folder / "trajectories.jsonl").open("a") as trajectories:
        metrics.write(row + "\n" + row[:10])
        trajectories.write(record[:50])
        metrics.flush(), trajectories.flush()
        assert run.refresh()
        assert (run.metrics[-1]["step"], run.steps, len(run.metrics)) == (3, [1, 2], 5)
        metrics.write(row[10:] + "\n")
        trajectories.write(record[50:] + "\n")
    assert run.refresh()
    assert (len(run.metrics), run.steps, len(run.trajectories(3))) == (6, [1, 2, 3], 1)


def test_after_a_resume_the_lines_that_it_took_back_are_gone(folder):
    run = vlmrl.load_run(folder)
    for name in ("metrics", "trajectories"):
        path = folder / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        again = [line.replace('"step": 2', '"step": 9') for line in lines[1:]]
        path.write_text("".join([lines[0], *again]))  # as long as before
    assert run.refresh()
    assert [row["step"] for row in run.metrics] == [1, 9, 9, 9]
    assert run.steps == [1, 9]
    assert len(run.failures) == 2


def test_a_folder_that_has_only_begun_or_lost_a_file_can_be_read(folder):
    run = vlmrl.load_run(folder)
    for name in ("trajectories.jsonl", "summary.json", "advisories.jsonl"):
        (folder / name).unlink()
    assert run.refresh()
    assert (run.steps, run.trajectories(), run.summary, run.advisories) == ([], [], {}, [])


def test_a_run_that_was_set_aside_has_the_name_of_its_folder(folder):
    aside = folder.rename(folder.with_name("shapes.1"))
    run = vlmrl.load_run(aside)
    assert (run.name, run.config["name"]) == ("shapes.1", "shapes")


def test_new_trajectories_are_read_one_at_a_time(folder):
    run, seen = RunData(folder), []

    def see(record, number):
        assert run.record(number) == record  # it can be read before the next one is
        seen.append((number, record["id"]))

    assert run.refresh(see) and seen == list(enumerate(record["id"] for record in run.trajectories()))
    assert not run.refresh(see) and len(seen) == 20


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        vlmrl.load_run(tmp_path / "none")
    with pytest.raises(ValueError, match=r"so it holds no run\.$"):
        vlmrl.load_run(tmp_path)
    (tmp_path / "first").mkdir()
    (tmp_path / "first/config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"so it holds no run\. Name runs in it, such as {tmp_path}/first\.$"):
        vlmrl.load_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "summary.json", "metrics.jsonl", "trajectories.jsonl", "advisories.jsonl"]
)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_only_regular_files_of_the_folder_are_read(folder, name, kind):
    secret = folder.parent / "secret.json"
    secret.write_text('{"step": 1, "secret": 1}\n')
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(secret if kind == "link" else folder / "nothing")
    with pytest.raises(
        ValueError, match=rf"{name}: it must be a regular file, .* links are not followed\. Copy the file there\."
    ):
        _ = vlmrl.load_run(folder).summary


def test_the_folder_itself_may_be_a_link(folder):
    (folder.parent / "latest").symlink_to(folder)
    assert vlmrl.load_run(folder.parent / "latest").metrics == vlmrl.load_run(folder).metrics


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"step": 1}', "is not a record of a trajectory: KeyError"),
        (
            '{"step": "1", "id": "a", "group_id": "a", "ending": "length", "turns": []}',
            "is not a record .* whole number",
        ),
        ('{"step": 1, "id": "a", "group_id": "a", "ending": "length", "turns": [{"images": [1]}]}', "is not a record"),
        (
            '{"step": 1, "id": "a", "group_id": "a", "ending": "length", "turns": [{"images": [], "parent": 0}]}',
            "is not a record .* parent of its turn 0",
        ),
    ],
)
def test_a_line_that_no_run_writes_is_one_error_that_names_it(folder, line, message):
    (folder / "trajectories.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"trajectories.jsonl: the line at byte 0 {message}"):
        vlmrl.load_run(folder)


def test_sizes_of_files_are_bounded(folder, monkeypatch):
    run = vlmrl.load_run(folder)
    image_id = run.trajectories(1)[0]["turns"][0]["images"][0]
    monkeypatch.setattr("vlmrl.report.run_data.MOST_BYTES", 100)
    assert run.image_path(image_id) is None
    (folder / "config.json").write_text(json.dumps({"name": "a" * 100}))
    with pytest.raises(ValueError, match=r"config\.json: it must be at most 100 bytes, but it has 112"):
        run.refresh()
    monkeypatch.setattr("vlmrl.report.json_lines.MOST_BYTES", 50)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="the line at byte 0 has more than 50 bytes"):
        vlmrl.load_run(folder)
