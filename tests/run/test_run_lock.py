"""Two runs of one name at the same time: the second is refused, and touches nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testing.runs import short_quickstart

from vlmrl.run import run_lock as lock_module
from vlmrl.run.program import run_training
from vlmrl.run.run_lock import run_lock
from vlmrl.utils.output_files import OutputError

HOLD = """
import sys
from pathlib import Path
from vlmrl.run.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_of_a_name_is_refused_and_changes_nothing(tmp_path, resume):
    config = short_quickstart(tmp_path)
    config.folder.mkdir(parents=True)
    (config.folder / "metrics.jsonl").write_text("the first run's")
    with run_lock(config.folder):
        before = files(config.folder)
        with pytest.raises(
            ValueError, match=rf"is written by process {os.getpid()} on \S+, since .*: wait for that run, end it"
        ):
            run_training(config, resume=resume)
        assert files(config.folder) == before
        assert [path.name for path in config.folder.parent.iterdir() if path.name.startswith(config.name)] == [
            config.name
        ]
    with run_lock(config.folder):
        pass


def test_a_folder_is_held_under_all_its_names(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("x")
    with (
        run_lock(tmp_path / "x"),
        pytest.raises(ValueError, match=f"process {os.getpid()} on"),
        run_lock(tmp_path / "link"),
    ):
        pass


def test_a_new_run_in_place_of_a_link_holds_the_links_name(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("x")
    with run_lock(tmp_path / "link"):
        (tmp_path / "link").rename(tmp_path / "link.1")  # as an earlier run is set aside
        (tmp_path / "link").mkdir()
        for name in ("link", "link.1", "x"):
            with pytest.raises(ValueError, match=f"process {os.getpid()} on"), run_lock(tmp_path / name):
                pass


def test_a_read_only_place_is_one_line_that_names_the_option(tmp_path, monkeypatch):
    def refused(path: Path | str, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "x", str(path))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OutputError, match=r"cannot be written: Read-only file system.* set output_dir"):
        run_lock(tmp_path / "x").__enter__()


def test_a_full_disk_is_one_line_that_names_the_option(tmp_path, monkeypatch):
    def refused(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refused)
    with pytest.raises(OutputError, match=r"cannot be written: No space left on device.* set output_dir"):
        run_lock(tmp_path / "x").__enter__()


@pytest.mark.slow
def test_a_killed_process_holds_nothing(tmp_path):
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert held.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"process {held.pid} on"), run_lock(tmp_path / "x"):
        pass
    held.send_signal(signal.SIGKILL)
    held.communicate()
    with run_lock(tmp_path / "x"):
        pass


@pytest.mark.slow
def test_a_fork_of_a_killed_process_holds_nothing(tmp_path):
    """The workers of an env's `ProcessPoolExecutor` live on, so that the run could not be resumed."""
    fork = "import os, time\nwith run_lock(Path(sys.argv[1])):\n    if not os.fork():\n        print(os.getpid(), flush=True)\n"
    hold = HOLD.partition("with")[0] + fork + "    time.sleep(600)\n"
    held = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "x")], stdout=subprocess.PIPE)
    child = int(held.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"process {held.pid} on"), run_lock(tmp_path / "x"):
            pass
        held.kill()
        held.wait()
        with run_lock(tmp_path / "x"):
            pass
    finally:
        held.kill()
        os.kill(child, signal.SIGKILL)
        held.wait()


def test_a_lock_is_written_through_no_link_and_no_pipe(tmp_path):
    """A folder of runs may be somebody else's: a link in it emptied the file that it leads to."""
    other, lock = tmp_path / "other", tmp_path / ".run.lock"
    other.write_text("precious")
    for make in (lambda: lock.symlink_to(other), lambda: os.mkfifo(lock)):
        make()
        with (
            pytest.raises(ValueError, match=r"\.run\.lock must be a regular file, .*: remove it"),
            run_lock(tmp_path / "run"),
        ):
            pass
        lock.unlink()
    assert other.read_text() == "precious"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, None])
def test_a_second_run_is_refused_where_locks_do_not_work_between_machines(error, tmp_path, monkeypatch):
    """Lustre and NFS may have no locks, or locks of one machine alone: both runs wrote their rows and checkpoints into one folder."""

    def flock(file, operation):
        if error is not None:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock_module, "BEAT", 0.01)
    with run_lock(tmp_path / "x"):
        monkeypatch.setattr(socket, "gethostname", lambda: "node2")
        with pytest.raises(ValueError, match=f"is written by process {os.getpid()} on"), run_lock(tmp_path / "x"):
            pass
    monkeypatch.setattr(lock_module, "WATCH", 0.0)
    with run_lock(tmp_path / "x"):  # the first one ended in order
        pass


def test_a_holder_that_was_paused_too_long_leaves_its_successors_lock(tmp_path, monkeypatch):
    """Its end emptied the file, so that a third run began while the second one went on."""
    monkeypatch.setattr(lock_module, "BEAT", 600.0)
    with run_lock(tmp_path / "x"):
        (tmp_path / ".x.lock").write_text("process 1 on node2, since 2026-01-01 00:00:00\n")
    assert (tmp_path / ".x.lock").read_text().startswith("process 1 on node2")


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_a_killed_run_can_be_resumed_where_there_are_no_locks(host, tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(lock_module, "WATCH", 0.2)
    (tmp_path / ".x.lock").write_text(f"process 1 on {host}, since 2026-01-01 00:00:00\n")
    with run_lock(tmp_path / "x"):
        assert (tmp_path / ".x.lock").read_text().startswith(f"process {os.getpid()} on node2, since ")
    assert not (tmp_path / ".x.lock").read_text()
