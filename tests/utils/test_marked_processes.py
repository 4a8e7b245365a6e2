"""Processes that are found by the mark in their environment are killed, whatever they do at that moment."""

from __future__ import annotations

import os
import select
import subprocess
import uuid

import pytest

from vlmrl.utils.marked_processes import MARK, kill_marked

TRIES, SECONDS = 50, 60.0
REPLACED = ["sh", "-c", f"setsid {'env ' * 100} sleep 3600 & echo started"]  # each env replaces itself by the next


@pytest.mark.slow
def test_a_process_that_replaces_its_program_is_killed():
    """A look may meet a process at a moment when its environment cannot be read."""
    for _ in range(TRIES):
        mark, (end, held) = uuid.uuid4().hex, os.pipe()
        environment = {**os.environ, MARK: mark}
        process = subprocess.Popen(REPLACED, env=environment, stdout=subprocess.PIPE, stderr=held)
        os.close(held)
        with process, os.fdopen(end) as stderr:
            assert process.stdout.readline() == b"started\n"
            kill_marked(mark)
            assert select.select([stderr], [], [], SECONDS)[0], "a process that holds the pipe is left"
            assert stderr.read() == ""
