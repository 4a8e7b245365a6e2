"""Training programs that Ray places, as a user starts them: processes that a test watches and kills, and leaves none of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.report.run_log import read_rows

MARK = "VLMRL_TEST_CLUSTER"  # in the environment of all processes that a test starts
MEMORY_MONITOR = "RAY_memory_monitor_refresh_ms"  # or Ray ends the ranks where other programs have taken the memory


def marked(mark: str) -> dict[int, str]:
    """The command lines of all living processes, but this one, that were started under ``mark``, by process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            pass  # it has ended
    return {process: line for process, line in found.items() if line}  # a zombie has none


def left_of(mark: str) -> dict[int, str]:
    """The processes that are still there after a while."""
    end = time.monotonic() + 300
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.2)
    return marked(mark)


def environment(process: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{process}/environ").read_text()
    except OSError:
        return {}
    return dict(each.partition("=")[::2] for each in text.split("\0"))


def running(mark: str, program: str) -> list[int]:
    """The processes that run ``program``, without the guards of their process groups."""
    return [process for process, line in marked(mark).items() if program in line and " -c " not in line]


def rank_processes(mark: str) -> dict[str, int]:
    """The processes that run the recipe, by rank."""
    own = {process: environment(process) for process in running(mark, "own.py")}
    return {variables["RANK"]: process for process, variables in own.items() if "VLMRL_CLUSTER" in variables}


@contextmanager
def training(
    folder: Path, mark: str, *options: str, text: str, program: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """The process that trains the recipe ``text``, beside a module ``helper``, by itself or by ``program``.

    Nothing that it has started is left after it.
    """
    (folder / "helper.py").write_text("SCALE = 0.5\n")
    (folder / "own.py").write_text(text)
    words = [sys.executable, *program, str(folder / "own.py"), "--output-dir", str(folder / "runs")]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {MARK: mark, "PYTHONPATH": os.pathsep.join(paths), MEMORY_MONITOR: "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen([*words, *options], env=variables, start_new_session=True, **pipes)
    try:
        yield run
        assert left_of(mark) == {}
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


def until_trained(run: subprocess.Popen[str], steps: int = 1) -> list[str]:
    """Return what the run has printed when it has trained so many steps."""
    lines = []
    for line in run.stdout:
        lines.append(line)
        found = re.match(r"train +(\d+)/", line)
        if found and int(found.group(1)) >= steps:
            return lines
    raise AssertionError("".join(lines))


def until_restarted(run: subprocess.Popen[str], metrics: Path, steps: int = 3) -> list[dict[str, Any]]:
    """Return the rows of all trained steps when so many of them were trained after a server had been started again."""
    output = []
    for line in run.stdout:  # what else the run prints must be read, or it waits
        output.append(line)
        rows = [row for row in read_rows(metrics) if "loss" in row]
        if sum(row["engine/restarts"] == 1 for row in rows) >= steps:
            return rows
    raise AssertionError("".join(output))
