"""Run a function on hostile input in a process of its own, within limits on CPU time, memory and waiting time.

    grade = BoundedFunction("grading.py:same_number", cpu_seconds=2)
    grade("1/2", "0.5")                   # the function's result
    grade("9^9^9^9", "0.5")               # LimitError: more than 2 s of CPU

Mathematics that a policy writes can keep a computer busy for ever, inside one call that holds Python's interpreter lock, so a
thread with a timeout does not help. The kernel ends the process; the next call starts another one.

Process pools that build on :mod:`multiprocessing` (pebble, loky) would import the running program into each process, and so torch,
and count seconds of a busy machine in place of CPU time.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from vlmrl.utils.bounded_worker import OUT_OF_MEMORY

WORKER = Path(__file__).with_name("bounded_worker.py")
START_SECONDS = 300.0  # to import the function's file, on a busy machine
LIMIT_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}  # deep recursion in C


class LimitError(Exception):
    """The call used more CPU time or memory than it may, or crashed its process: its input is at fault."""


class BoundedFunction:
    """``file.py:function`` or ``module:function``, called in worker processes that are reused. Thread-safe; a call blocks its thread.

    Arguments and results are JSON values. A call may use ``cpu_seconds`` of CPU time and ``memory_mb`` MiB of memory beyond what the
    function's imports use. A file is imported by its path alone: keep it small, and let it not import vlmrl (and so torch).

    At most ``processes`` calls run at once; others wait, for as long as it takes. Processes start when they are needed. They end
    with this process, or by :meth:`close`.
    """

    def __init__(
        self,
        function: str,
        *,
        cpu_seconds: float = 2.0,
        memory_mb: int = 1024,
        timeout: float = 120.0,
        processes: int = 4,
    ) -> None:
        limits = {"cpu_seconds": cpu_seconds, "memory_mb": memory_mb, "timeout": timeout, "processes": processes}
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name} of a BoundedFunction must be above 0, but it is {value}.")
        where, _, name = function.rpartition(":")
        if not where or not name:
            raise ValueError(
                f"a BoundedFunction must be 'file.py:function' or 'module:function', but it is {function!r}."
            )
        self._settings = (function, cpu_seconds, memory_mb, timeout, processes)
        self._slots = threading.Semaphore(processes)
        self._idle: list[_Worker] = []
        self._owner = os.getpid()
        weakref.finalize(self, _close_all, self._idle)  # also when this process ends

    def __call__(self, *args: Any) -> Any:
        """The function's result.

        Raises:
            LimitError: the call went over a limit, or crashed its process.
            TimeoutError: no result in ``timeout`` seconds although the CPU limit was not reached, as on an overloaded machine.
            RuntimeError: the function raised an error or cannot be imported, or its process was ended from outside.
        """
        function, cpu_seconds, memory_mb, timeout, processes = self._settings
        if self._owner != os.getpid():  # after a fork: two processes must not read the results of one worker
            self._owner, self._slots = os.getpid(), threading.Semaphore(processes)
            self._idle.clear()
        with self._slots:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = _Worker(function, cpu_seconds, memory_mb, timeout)
            try:
                response = worker.call(args, timeout)
            except BaseException:
                worker.kill()
                raise
            self._idle.append(worker)
        if "error" in response:
            raise RuntimeError(f"{function}: {response['error']}")
        return response["result"]

    def close(self) -> None:
        """End the idle processes. A later call starts new ones."""
        _close_all(self._idle)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, self._settings  # a copy, such as that of a task which holds one, has workers of its own


def _copied(function: str, cpu_seconds: float, memory_mb: int, timeout: float, processes: int) -> BoundedFunction:
    return BoundedFunction(function, cpu_seconds=cpu_seconds, memory_mb=memory_mb, timeout=timeout, processes=processes)


def _close_all(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().kill()


class _Worker:
    """One process of `bounded_worker.py`, which has imported the function."""

    def __init__(self, function: str, cpu_seconds: float, memory_mb: int, timeout: float) -> None:
        self._function = function
        self._cpu_seconds, self._memory_mb = cpu_seconds, memory_mb
        settings = [function, str(cpu_seconds), str(memory_mb), str(timeout)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *settings],  # -P: vlmrl/utils is no place to import from
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._is_ready = False

    def call(self, args: tuple[Any, ...], timeout: float) -> dict[str, Any]:
        if not self._is_ready:
            started = self._read(START_SECONDS)
            if "error" in started:
                raise RuntimeError(f"{self._function}: {started['error']}")
            self._is_ready = True
        assert self._process.stdin is not None
        line = json.dumps(args).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            raise self._death() from None
        response: dict[str, Any] = self._read(timeout)
        return response

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, timeout: float) -> Any:
        """The next line of the process, as JSON."""
        assert self._process.stdout is not None
        pipe, chunks, deadline = self._process.stdout.fileno(), [b""], time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not chunks[-1].endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{self._function}: no result in {timeout:g} s.")
                chunks.append(os.read(pipe, 1 << 16))
                if not chunks[-1]:
                    raise self._death()
        return json.loads(b"".join(chunks))

    def _death(self) -> Exception:
        """Why the process ended: an error of the input (LimitError), or of anything else."""
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return LimitError(f"{self._function}: more than {self._cpu_seconds:g} s of CPU.")
        if status == OUT_OF_MEMORY:
            return LimitError(f"{self._function}: more than {self._memory_mb} MiB of memory.")
        if -status in LIMIT_SIGNALS and self._is_ready:
            return LimitError(f"{self._function}: its process crashed ({signal.Signals(-status).name}).")
        return RuntimeError(f"{self._function}: its process ended with status {status}.")
