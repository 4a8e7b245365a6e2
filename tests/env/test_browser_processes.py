"""No process of a browser is left when the process that started it has ended, however it ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from testing.browser import need_chromium
from testing.browsers import left_of, processes, started

from vlmrl.env.browser.browser_pool import PoolLimits
from vlmrl.env.browser.chromium_process import ChromiumProcess

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, sys, threading
from pathlib import Path
from testing.browsers import opened, page_env

async def main():
    env_class = page_env(Path(sys.argv[1]), "<p>Hello</p>")
    async with opened(env_class) as env, opened(env_class):
        print("ready", env._pool.counts["started"], flush=True)
        for line in sys.stdin:  # until the test closes it
            pass
        if sys.argv[2] == "raise":
            raise KeyError("the run fails")

asyncio.run(main())
"""


def start(folder: Path, ending: str = "return") -> subprocess.Popen[str]:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent)])
    words = [sys.executable, "-c", SCRIPT, str(folder), ending]
    process = subprocess.Popen(
        words,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready 1\n", process.communicate()[1]
    return process


def assert_all_end(found: dict[int, int]) -> None:
    until = time.monotonic() + 60
    while left := left_of(found):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.05)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "playwright" in path.name or "hromium" in path.name]


@pytest.fixture(autouse=True)
def chromium():
    need_chromium()


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are too long for Chromium's sockets
        yield Path(name)


def test_after_sigkill(folder):
    process = start(folder)
    begun = processes(process.pid)
    assert len(begun) > 3
    process.kill()
    process.communicate()
    assert_all_end(begun)
    assert left_in(folder) == []


@pytest.mark.parametrize(("ending", "status"), [("return", 0), ("raise", 1)])
def test_after_the_programs_own_end(folder, ending, status):
    process = start(folder, ending)
    begun = processes(process.pid)
    _, errors = process.communicate()
    assert process.returncode == status
    assert "never retrieved" not in errors
    assert_all_end(begun)
    assert left_in(folder) == []


def folders_left(folder: Path) -> list[str]:
    """Without the driver's, which may end before it removes that one."""
    return [name for name in left_in(folder) if "artifacts" not in name]


def test_no_folder_is_left_of_a_chromium_that_is_killed(folder):
    process = start(folder)
    begun = processes(process.pid)
    assert len(left_in(folder)) == 3, left_in(folder)  # the profile, its socket, and the driver's
    os.kill(main_of(begun), signal.SIGKILL)
    process.communicate()
    assert_all_end(begun)
    assert folders_left(folder) == []


def test_a_chromium_whose_driver_is_killed_while_it_starts_is_ended(folder):
    program, written = folder / "chromium", folder / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {written}.part && mv {written}.part {written} && exec sleep 600\n")
    program.chmod(0o755)

    async def kill_the_driver() -> dict[int, int]:
        starting = asyncio.create_task(ChromiumProcess.start(str(program), lambda process: None))
        while not written.exists():
            assert not starting.done(), starting
            await asyncio.sleep(0.01)
        pid = int(written.read_text())
        begun = {pid: started(pid)}
        [driver] = re.findall(r"^PPid:\s+(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        os.kill(int(driver), signal.SIGKILL)
        with pytest.raises(Exception, match="closed"):
            await starting
        return begun

    assert_all_end(asyncio.run(kill_the_driver()))


def test_a_chromium_that_hangs_ends_with_its_program_whether_that_returns_or_is_killed(folder):
    """Playwright gives each half a minute: both at the same time."""
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    returns, killed = start(folder / "a"), start(folder / "b")
    hanging, all_hanging = processes(returns.pid), processes(killed.pid)
    os.kill(main_of(hanging), signal.SIGSTOP)
    for pid in all_hanging:  # a Chromium that hangs does not notice that its driver has ended
        if b"run-driver" not in command_of(pid):
            os.kill(pid, signal.SIGSTOP)
    killed.kill()
    killed.communicate()
    returns.communicate()
    assert_all_end(hanging | all_hanging)
    assert folders_left(folder / "a") == []


def main_of(pids: Iterable[int]) -> int:
    (main,) = [pid for pid in pids if chromium_main(pid)]
    return main


def chromium_main(pid: int) -> bool:
    words = command_of(pid)
    return b"--user-data-dir" in words and b"--type=" not in words


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_after_sigterm_and_ctrl_c(folder):
    for number in (signal.SIGTERM, signal.SIGINT):
        process = start(folder)
        begun = processes(process.pid)
        process.send_signal(number)
        process.communicate()
        assert_all_end(begun)


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused_by_name(folder, monkeypatch):
    (long := folder / ("long" * 15)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(
        ValueError, match=r"TMPDIR must be at most 62 bytes long for Chromium, but .* has \d+\. .*TMPDIR=/tmp"
    ):
        PoolLimits.of()
