"""Processes that are found by the mark in their environment are killed, whatever they do at that moment."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid

import pytest

from vlmrl.utils import marked_processes
from vlmrl.utils.marked_processes import MARK, kill_marked

TRIES, SECONDS = 50, 60.0
REPLACED = ["sh", "-c", f"setsid {'env ' * 100} sleep 3600 & echo started"]  # each env replaces itself by the next
FORKING = """
import os, time
print("started", flush=True)
for _ in range(300):
    if os.fork():
        os._exit(0)
time.sleep(3600)
"""


# An environment above 8 KiB takes several reads: the program may be replaced between two.
@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 20_000])
def test_a_process_that_replaces_its_program_is_killed(padding):
    """A look may meet a process at a moment when its environment cannot be read."""
    for _ in range(TRIES):
        _check_killed(REPLACED, padding)


@pytest.mark.slow
def test_a_machine_that_stands_still_for_the_whole_time_limit(monkeypatch):
    """One look may not find the process, and the time is over afterwards."""
    monkeypatch.setattr(marked_processes, "KILL_SECONDS", 0.0)
    for _ in range(TRIES):
        _check_killed(REPLACED, 0)


@pytest.mark.slow
def test_a_process_that_starts_another_and_ends_leaves_none():
    """Each of 300 processes starts the next and ends, so that a list of all processes is old before its last is looked at."""
    for _ in range(5):
        _check_killed([sys.executable, "-c", FORKING], 0)


@pytest.mark.slow
def test_a_process_without_the_mark_is_looked_at_twice_while_others_start(monkeypatch):
    """A look at thousands of processes takes so long that others start in each: it must not be followed by more such looks."""
    started, looked_at, is_marked = [_idle_process()], list[int](), marked_processes._is_marked

    def looking(process, entry):
        pid = int(process.name)
        looked_at.append(pid)
        if pid == started[-1].pid and len(started) < 10:
            started.append(_idle_process())  # it begins during the look
        return is_marked(process, entry)

    monkeypatch.setattr(marked_processes, "_is_marked", looking)
    try:
        kill_marked(uuid.uuid4().hex)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert len(started) == 10
    assert looked_at.count(os.getpid()) == 2


def _idle_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "3600"])


def _check_killed(command: list[str], padding: int) -> None:
    mark, (end, held) = uuid.uuid4().hex, os.pipe()
    environment = {**os.environ, "PADDING": "x" * padding, MARK: mark}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=held)
    os.close(held)
    with process, os.fdopen(end) as stderr:
        assert process.stdout.readline() == b"started\n"
        kill_marked(mark)
        assert select.select([stderr], [], [], SECONDS)[0], "a process that holds the pipe is left"
        assert stderr.read() == ""
