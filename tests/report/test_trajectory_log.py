"""What a run's folder holds of the trajectories of a step."""

import asyncio
import math
import threading

import pytest
from PIL import Image
from testing.fakes import item_of
from testing.trajectories import IMAGE, turn

import vlmrl
from vlmrl.report import json_lines, trajectory_log
from vlmrl.report.run_log import RunLog
from vlmrl.report.trajectory_log import TrajectoryLog, kept_whole
from vlmrl.types import Task, Trajectory
from vlmrl.utils.work_pool import WorkPool

BLUE = item_of("b1ue", Image.new("RGB", (32, 32), "blue"), 1)


def played(group, member, media=(), **more):
    fields = {"ending": "env_done"} | more
    return Trajectory(f"{group}/{member}", group, Task("t", []), [turn(1.0, media=media)], **fields)


def write(folder, *calls, keep=2):
    """Write each of ``calls``, the arguments of ``TrajectoryLog.write``, and load the run."""
    with RunLog(folder) as log:
        log.log(1, {})
        writer = TrajectoryLog(log, lambda ids: f"<{ids[0]}>", keep)
        for call in calls:
            asyncio.run(writer.write(*call))
    return vlmrl.load_run(folder)


def test_the_first_groups_and_failed_trajectories_are_kept_whole_and_the_others_keep_their_text(tmp_path):
    groups = [played(group, member, [IMAGE]) for group in ("a", "b") for member in range(2)]
    lost = played("b", "2", [BLUE], ending="error", error="TimeoutError: 61 s", retried=True)
    run = write(tmp_path, (1, "train", groups, [lost]))
    records = run.trajectories(1, "train")
    assert [record["id"] for record in records] == ["a/0", "a/1", "b/0", "b/1", "b/2"]
    assert [record["turns"][0].get("tokens") for record in records] == [
        ["<7>", "<8>"],
        ["<7>", "<8>"],
        None,
        None,
        ["<7>", "<8>"],
    ]
    assert {record["turns"][0]["text"] for record in records} == {"ok"}
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["b1ue.png", "c0ffee.png"]
    assert run.image("b1ue").getpixel((0, 0)) == (0, 0, 255)
    [failure] = run.failures
    assert (failure["reason"], failure["retried"], failure["turns"]) == ("TimeoutError: N s", True, 1)


def test_long_texts_are_cut_where_no_command_could_read_the_line(tmp_path, monkeypatch):
    """An env's message of a role that the template does not show has no tokens."""
    monkeypatch.setattr(trajectory_log, "MOST_LINE", 400_000)
    monkeypatch.setattr(json_lines, "MOST_BYTES", 4 * 400_000)
    whole, long = played("a", "0"), played("b", "0")
    whole.turns[0].messages = [{"role": "developer", "content": "x" * 100_000}]
    long.turns[0].messages = [{"role": "developer", "content": "\1" * 1_000_000, "name": "n" * 20_000}]
    run = write(tmp_path, (1, "train", [whole, long]))
    kept, cut = run.trajectories(1, "train")
    assert kept["prompt"] == "x" * 100_000 and cut["reward"] == 1.0
    assert cut["prompt"] == "\1" * 10_000 + " [990000 characters are left out]"


def test_records_are_made_off_the_event_loop(tmp_path):
    threads = set()

    def decode(ids):
        threads.add(threading.current_thread())
        return "x"

    with RunLog(tmp_path) as log:
        asyncio.run(TrajectoryLog(log, decode, 2).write(1, "train", [played("a", 0)]))
    assert threads and threading.main_thread() not in threads


def test_an_image_is_written_once(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        "vlmrl.report.trajectory_log.write_image", lambda item, path: written.append(path.touch() or item.id)
    )
    step = (1, "train", [played("a", 0, [IMAGE, IMAGE]), played("a", 1, [IMAGE])])
    write(tmp_path, step, (2, *step[1:]))
    assert written == ["c0ffee"]


def test_an_image_that_cannot_be_written_is_an_error_before_its_record(tmp_path, monkeypatch):
    def fail(item, path):
        raise OSError("no space")

    monkeypatch.setattr("vlmrl.report.trajectory_log.write_image", fail)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, (1, "train", [played("a", 0, [IMAGE])]))
    assert vlmrl.load_run(tmp_path).trajectories() == []


def test_a_file_system_that_stands_still_for_long_is_waited_for(tmp_path, monkeypatch):
    """Writing an image had 60 s, which a shared file system may take: the run ended, without a checkpoint of its last step."""

    class Patient(WorkPool):
        async def run(self, seconds, function, *args):
            assert seconds == math.inf
            return await super().run(seconds, function, *args)

    pool = Patient("cpu", 1)
    monkeypatch.setattr(trajectory_log, "cpu_pool", lambda: pool)
    write(tmp_path, (1, "train", [played("a", 0, [IMAGE])]))
    pool.close()
    assert (tmp_path / "images" / f"{IMAGE.id}.png").exists()


@pytest.mark.parametrize(("count", "kept"), [(0, ""), (1, "aa"), (2, "aa"), (3, "aa"), (5, "aabbb"), (64, "aabbbc")])
def test_groups_are_kept_whole(count, kept):
    trajectories = [played(group, number) for number, group in enumerate("aabbbc")]
    assert "".join(each.group_id for each in kept_whole(trajectories, count)) == kept
