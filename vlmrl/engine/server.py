"""One inference server: its address, its process if the run starts it, and its state."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from vlmrl.types import MediaItem
from vlmrl.utils.folders import check_compiled_code
from vlmrl.utils.tokens import bearer_token

TOKEN_VARIABLE = "VLMRL_SERVER_TOKEN"
"""Environment variable with the token of external servers."""
FIRST_BACKOFF = 0.5  # seconds without requests after an outage began, doubled each time that it goes on
LONGEST_BACKOFF = 30.0
SILENT_SECONDS = 30.0  # that a request must have waited before its server counts as silent
STOP_SECONDS = 8.0  # from SIGTERM to SIGKILL
TAIL = 2000  # characters of a log or of a response that an error shows
UNREACHED = (aiohttp.ClientError, TimeoutError, OSError)  # raised by a call that got no response

# Run in the child before the server: the kernel kills it when the thread that started it ends, even by SIGKILL. A fork waits until the
# server is gone, however it ends, and then kills the rest of its process group, which could live on.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
prctl = ctypes.CDLL(None).prctl
server = os.getpid()
if not os.fork():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the server's
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    prctl(1, signal.SIGUSR1)
    if os.getppid() == server:
        signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)
prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} cannot be run: {error.strerror}")
"""


class ServerError(Exception):
    """A server answered with an error; ``status`` is the HTTP status. An unreachable server raises one of UNREACHED instead."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Launch:
    """How to start one server: its command line, environment variables added to this process's, and its log file."""

    command: Sequence[str]
    env: dict[str, str] = field(repr=False)  # may contain secrets
    log: Path


@dataclass(frozen=True)
class ServerInfo:
    """What a server reports about itself. ``device`` is ``cuda`` or ``cpu``; ``None``: not reported."""

    version: str = "unknown"
    tp: int = 1
    device: str = "cpu"
    dtype: str | None = None
    """Such as ``bfloat16``."""
    max_prompt_tokens: int | None = None
    holds_images: bool = False
    """It keeps processed images, and a request may name one by its hash instead of containing it."""
    nccl: str | None = None
    """Version of its NCCL, such as ``2.30.7``."""


class ServerProcess(Protocol):
    """The process of a server that the run starts: a :class:`LocalProcess`, or one on another machine."""

    @property
    def alive(self) -> bool:
        """Whether the process runs. The server itself is not called."""
        ...

    def start(self) -> None: ...

    def stop(self, graceful: bool = True) -> None:
        """End the process and all its children: with SIGTERM first if ``graceful``, then with SIGKILL."""
        ...

    def log_tail(self) -> str:
        """The end of its log, for an error message."""
        ...


class LocalProcess:
    """A server's process on this machine. It ends with the thread that starts it, even if that thread is killed."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status, negative after a signal. None: the process runs, or was not started."""
        return None if self._process is None else self._process.poll()

    @property
    def group(self) -> int:
        """The process group of the server and its children."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        check_compiled_code()
        with self.launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *self.launch.command],
                env=os.environ | self.launch.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its own process group: Ctrl-C does not reach it, and one signal ends all of it
            )

    def stop(self, graceful: bool = True) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if graceful and process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        _signal_group(process, signal.SIGKILL)
        process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, and not to its children."""
        if self._process is not None:
            self._process.send_signal(number)

    def log_tail(self) -> str:
        if not self.launch.log.exists():
            return ""
        return f"; the end of {self.launch.log}:\n{self.launch.log.read_text(errors='replace')[-TAIL:]}"


class Server:
    """State of the server at ``url``. ``process``: None if the run did not start it. ``reads_files``: it sees this machine's files.

    ``token`` is sent with every request, as a Bearer token. ``beside``: the trainer rank whose GPU memory it can map, or such a rank
    for each of its own ranks; empty: it can map no rank's.
    """

    def __init__(
        self,
        url: str,
        process: ServerProcess | None = None,
        reads_files: bool = False,
        token: str | None = None,
        beside: tuple[int, ...] = (0,),
    ) -> None:
        self.url = url.rstrip("/")
        self.process = process
        self.reads_files = reads_files
        self.token = token
        self.beside = beside
        self.ready = False
        """It is healthy and has the current weights: it may serve."""
        self.unresponsive = False
        """It failed its last health check. It gets no new requests until it passes one."""
        self.silent = False
        """A request was given up, and it has answered none since that one began. Where others serve, it gets one request at a time."""
        self.asleep = False
        """Its KV cache memory is released to the trainer."""
        self.without_weights = False
        """The memory of its weights is released, too. It must get an update before it serves."""
        self.last_error = ""
        """Why it could not be made to serve again, for an error message. Empty while it serves."""
        self.in_flight = 0
        """Number of requests that it is working on."""
        self.info = ServerInfo()
        self.images: weakref.WeakSet[MediaItem] = weakref.WeakSet()
        """The images that it has processed, if ``info.holds_images``. It may have dropped some since."""
        self.sent_bytes = 0
        """Of all requests to sample."""
        self.check_health = asyncio.Event()
        """Set to do the next health check at once."""
        self.drained = asyncio.Event()
        """Set when it is taken out of service; replaced when it serves again."""
        self._backoff = 0.0  # seconds, of the outage that goes on
        self._failed_at = -math.inf  # when the last failure was counted
        self._answered_at = -math.inf

    @property
    def alive(self) -> bool:
        """False if its process has ended. True for a server that the run did not start."""
        return self.process is None or self.process.alive

    @property
    def backoff(self) -> float:
        """Seconds until it may get requests again after its last failure."""
        return max(0.0, self._failed_at + self._backoff - time.monotonic())

    def failed(self, began: float) -> None:
        """A call that began at ``began`` (``time.monotonic()``) failed: start or extend the back-off, and check its health.

        A call that was in flight when an earlier one failed has met the same outage. It does not count again, however many there are.
        """
        if began > self._failed_at:
            self._backoff = min(LONGEST_BACKOFF, 2 * self._backoff or FIRST_BACKOFF)
            self._failed_at = time.monotonic()
        self.check_health.set()

    def given_up(self, began: float) -> None:
        """A request that began at ``began`` got no response in time, or was cancelled. Short waits say nothing about the server."""
        self.silent |= time.monotonic() - began > SILENT_SECONDS and began > self._answered_at

    def answered(self) -> None:
        """A call succeeded: end the back-off."""
        self._backoff, self.silent, self._answered_at = 0.0, False, time.monotonic()

    def log_tail(self) -> str:
        return "" if self.process is None else self.process.log_tail()


def external_servers(urls: Sequence[str]) -> list[Server]:
    """Running servers. Their token is in the environment."""
    token = bearer_token(TOKEN_VARIABLE)
    return [Server(url, token=token) for url in urls]


async def suppress_unreachable(call: Coroutine[Any, Any, Any]) -> None:
    """Await ``call`` and ignore its failure: for calls that change nothing if the server cannot be reached."""
    with contextlib.suppress(*UNREACHED, ServerError):
        await call


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
