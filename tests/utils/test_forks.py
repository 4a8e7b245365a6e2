"""A process that is forked has none of the threads of its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 600.0  # seconds, after which a test that hangs fails

FORKED = """
import asyncio, math, multiprocessing
from vlmrl.utils.threads import LoopThread
from vlmrl.utils.work_pool import cpu_pool

async def pooled():
    return await cpu_pool().run(math.inf, str, 1)

async def slept():
    await asyncio.sleep(0)
    return "1"

loop = LoopThread("own")
calls = [lambda: asyncio.run(pooled()), lambda: loop.wait(slept()), lambda: asyncio.run(loop.run(slept()))]

def forked():
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)

print(*[call() for call in calls], flush=True)
process = multiprocessing.get_context("fork").Process(target=forked)
process.start()
process.join()
"""


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_worked_is_refused():
    """As with multiprocessing's `fork`: a second `vlmrl.train`, in a fork, waited for ever."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=LIMIT)
    first, *refused = done.stdout.splitlines()
    assert first == "1 1 1" and len(refused) == 3, done.stderr
    assert all("start the process by multiprocessing.get_context('spawn')" in line for line in refused)
    assert not done.stderr
