"""Runs a command of an agent or an MCP server, and ends all processes that it started when it ends or the run is killed.

    python command_guard.py SECONDS COMMAND ...
    python command_guard.py SECONDS --input COMMAND ...

The command has a session of its own, and this process ends with its status. SIGTERM is passed on to its process group, followed by
SIGKILL after SECONDS. Then its other processes are killed: on Linux also those in sessions of their own, which become children of this
process. Standard input is a pipe from the run; if the run ends, the command is killed, and its working folder deleted. With
``--input`` the pipe is the command's own standard input, and its folder stays.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

INPUT = "--input"
WATCH_SECONDS = 0.5  # between two looks whether the run, this process's parent, is there
SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans below this process become its children


class Guard:
    def __init__(self, seconds: float, command: list[str], has_input: bool) -> None:
        self.run_has_ended = False
        self._parent = os.getppid() if has_input else None
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: signal.Signals | None = None
        with contextlib.suppress(AttributeError):  # not on Linux
            ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        threading.Thread(target=self._watch_run, daemon=True).start()
        given = None if has_input else subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=given, start_new_session=True)
        if self._signal is not None:
            self._send(self._signal)

    def wait(self) -> int:
        """The command's status, when nothing is left of it, or after SECONDS of killing what is left."""
        assert self._process is not None
        pid, status = 0, 0
        while pid != self._process.pid:  # or one of its orphans: a zombie keeps its process id
            pid, status = os.waitpid(-1, 0)
        self._send(signal.SIGKILL)
        self._process = None  # its number may be given again
        until = time.monotonic() + self._seconds
        with contextlib.suppress(ChildProcessError):  # none is left
            while time.monotonic() < until:
                for child in children():
                    with contextlib.suppress(PermissionError):  # another user's
                        os.kill(child, signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.001)
        return os.waitstatus_to_exitcode(status)

    def _watch_run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGALRM))  # they are for the main thread
        if self._parent is None:
            sys.stdin.buffer.read()
        while os.getppid() == self._parent:
            time.sleep(WATCH_SECONDS)
        self.run_has_ended = True
        self._send(signal.SIGKILL)

    def _stop(self) -> None:
        self._send(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _send(self, number: signal.Signals) -> None:
        self._signal = number  # for a command that is just being started
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def children() -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields: Any = status.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(status.parent.name))
    return found


def delete_all(folder: Path) -> None:
    """Delete a folder and all that is in it, as far as that is possible. Python's own way fails for folders nested 1,000 deep.

    A folder in which something is mounted stays: a sandbox that was killed may have left the user's own folders there.
    """
    if mounted := mounts_in(folder):
        print(
            f"{folder} is not deleted, since {mounted[0]} is a mount: unmount it, then delete the folder.",
            file=sys.stderr,
        )
        return
    _run("rm", "-rf", "--", folder)
    if folder.is_dir() and not folder.is_symlink():  # it holds folders without the right to write, such as Go's modules
        _run("chmod", "-R", "u+rwX", "--", folder)
        _run("rm", "-rf", "--", folder)


def mounts_in(folder: Path) -> list[str]:
    """The places in a folder where something is mounted, on Linux."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        places = [line.split(" ")[4] for line in lines]  # in which a space is written \040
        beginning = str(folder.resolve()).replace(" ", "\\040") + "/"
        return [place for place in places if place.startswith(beginning)]
    return []


def _run(*command: Any) -> None:
    with contextlib.suppress(OSError):
        subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def run_guarded() -> None:
    folder = Path.cwd()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    has_input = sys.argv[2] == INPUT
    guard = Guard(float(sys.argv[1]), sys.argv[2 + has_input :], has_input)
    status = guard.wait()
    if guard.run_has_ended and not has_input:
        delete_all(folder)
        with contextlib.suppress(OSError):  # another command's folder is still there
            folder.parent.rmdir()
    if status < 0:  # end by the same signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    run_guarded()
