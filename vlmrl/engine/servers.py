"""SGLang servers: attached by their addresses or started here, watched, and given a new life when they die.

A server serves only between two promises: it answered its health check, and it has the current weights. Whatever breaks one of
them takes it out of service until both hold again. The processes started here end with this one, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from vlmrl.config import SGLang
from vlmrl.engine.base import EngineError

FIRST_REST = 0.5  # seconds without requests after a failure, doubled by each further one
LONGEST_REST = 30.0
LOOK_SECONDS = 30.0  # that one health check may take; SGLang answers after 20 at the latest
STOP_SECONDS = 8.0  # that a process has to end by itself
TAIL = 2000  # characters of a log that an error shows
UNREACHED = (aiohttp.ClientError, TimeoutError, OSError)  # how a call fails that no server answers
CPU_ARGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.3,
    "max-total-tokens": 65536,
    "sleep-on-idle": True,
}
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # to compile takes minutes there, and gains nothing

# Run in the child before the server: it is killed when the thread that started it ends, even if by SIGKILL.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServerError(Exception):
    """A server refused a call: ``status`` is HTTP's. One that could not be reached raises aiohttp's own errors."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Launch:
    """How to start one server: its command line, its environment beside ours, and where its log goes."""

    command: Sequence[str]
    env: dict[str, str]
    log: Path


class Process(Protocol):
    """A server's, where it is started here: :class:`LocalProcess`, or one on another machine."""

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as one can know without asking the server."""
        ...

    def start(self) -> None: ...

    def stop(self, gently: bool = True) -> None:
        """End it and all that it started itself."""
        ...

    def log_tail(self) -> str:
        """The end of its log, for an error message."""
        ...


class LocalProcess:
    """A server's process on this machine. It ends with the thread that starts it, even if that is killed."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def group(self) -> int:
        """The process group of it and of all that it starts."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        with self.launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *self.launch.command],
                env=os.environ | self.launch.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own: no Ctrl-C reaches it, and all of it can be ended
            )

    def stop(self, gently: bool = True) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if gently and process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        _signal_group(process, signal.SIGKILL)
        process.wait()

    def log_tail(self) -> str:
        if not self.launch.log.exists():
            return ""
        return f"; the end of {self.launch.log}:\n{self.launch.log.read_text(errors='replace')[-TAIL:]}"


class Server:
    """One server, by its ``url``; with ``process``, one that is started here. ``sees_files``: it can read this machine's.

    ``ready``: it may serve; ``doubted``: it does not answer its health check, and gets no new requests. ``weights`` names the weights
    it has, ``None`` where that is not known. ``in_flight`` counts the requests it works on. ``info`` is what it tells about itself.
    ``lends``: the trainer has the memory of its keys and values.
    """

    def __init__(self, url: str, process: Process | None = None, sees_files: bool = False) -> None:
        self.url = url.rstrip("/")
        self.process = process
        self.sees_files = sees_files
        self.ready = False
        self.doubted = False
        self.weights: str | None = None
        self.in_flight = 0
        self.lends = False
        self.info: dict[str, Any] = {}
        self.suspected = asyncio.Event()
        self.gone = asyncio.Event()  # replaced by a new one when it serves again
        self._failures = 0
        self._resting_until = 0.0

    @property
    def alive(self) -> bool:
        """Whether it is worth to ask it anything."""
        return self.process is None or self.process.alive

    @property
    def rest(self) -> float:
        """Seconds until it may be asked again after its last failure."""
        return max(0.0, self._resting_until - time.monotonic())

    def failed(self) -> None:
        """It did not answer as it should: let it rest, and have its health looked at."""
        self._resting_until = time.monotonic() + min(LONGEST_REST, FIRST_REST * 2**self._failures)
        self._failures += 1
        self.suspected.set()

    def answered(self) -> None:
        self._failures, self._resting_until = 0, 0.0

    def log_tail(self) -> str:
        return "" if self.process is None else self.process.log_tail()


class Servers:
    """All servers of one run. Its coroutines run in one event loop, that of the engine's thread.

    ``bring`` gives a server the current weights; until it returns, the server does not serve. Set it before :meth:`start`.
    ``colocated``: the trainer has the GPUs while they are paused, so that none is started then. ``at_end`` is called when all have
    stopped.
    """

    def __init__(
        self,
        config: SGLang,
        servers: Sequence[Server],
        at_end: Callable[[], None] | None = None,
        colocated: bool = False,
    ) -> None:
        self.config = config
        self.all = list(servers)
        self._at_end = at_end
        self.bring: Callable[[Server], Awaitable[None]] = _nothing
        self.restarts = 0
        self.paused = False
        self.colocated = colocated
        self.changing = asyncio.Lock()  # held while weights change, or one server gets them
        self._starting: set[Server] = set()
        self._changed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.ready]

    @property
    def see_files(self) -> bool:
        """Whether they can read images from this machine's files."""
        auto = self.config.images == "auto" and all(server.sees_files for server in self.all)
        return self.config.images == "file" or auto

    async def start(self) -> None:
        """Wait until all servers answer. Raises EngineError where one does not within ``sglang.start_timeout``."""
        limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None))
        for server in self.all:
            if server.process is not None:
                server.process.start()
        await asyncio.gather(*map(self._until_up, self.all))

    async def serve_all(self) -> None:
        """All are up and have the current weights: let them serve, and look after them from now on."""
        for server in self.all:
            await self.serve(server)
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self.all]

    async def close(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        processes = [server.process for server in self.all if server.process is not None]
        try:
            await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        finally:
            if self._at_end is not None:
                self._at_end()

    async def call(self, server: Server, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """GET ``path``, or POST ``body`` (what JSON can hold, or JSON that is encoded already).

        Raises ServerError where the server answers with an error, and aiohttp's errors or TimeoutError where it does not answer.
        """
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout)
        given: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            given = {"data": body, "headers": {"Content-Type": "application/json"}}
        asked = self._session.get if body is None else self._session.post
        async with asked(server.url + path, timeout=limit, **({} if body is None else given)) as answer:
            if answer.status != 200:
                raise ServerError(
                    f"{server.url}{path}: HTTP {answer.status}: {(await answer.text())[:TAIL]}", answer.status
                )
            return await answer.json(content_type=None) if answer.content_length != 0 else None

    async def pick(self, favourite: Server | None, patience: float) -> Server:
        """``favourite`` if it serves, else the one with the least to do; waits while none serves, or all are paused.

        Raises EngineError after ``patience`` seconds.
        """
        until = time.monotonic() + patience
        while True:
            able = (
                [server for server in self.ready if not server.rest and not server.doubted] if not self.paused else []
            )
            if favourite in able and favourite is not None:
                return favourite
            if able:
                return min(able, key=lambda server: server.in_flight)
            left = until - time.monotonic()
            if left <= 0:
                told = ", ".join(server.url for server in self.all)
                raise EngineError(f"no SGLang server has served for {patience:g} s ({told}){self.all[0].log_tail()}")
            rests = [server.rest for server in self.ready if server.rest]
            await self._wait_for_change(min([left, *rests] if not self.paused else [left]))

    async def serve(self, server: Server) -> None:
        """It is up and has the current weights: let it serve."""
        server.answered()
        server.ready = True
        server.gone = asyncio.Event()
        await self.notify()

    async def withdraw(self, server: Server) -> None:
        """It serves no longer; requests that wait for it go elsewhere."""
        server.ready, server.weights = False, None
        server.gone.set()
        await self.notify()

    async def settle(self) -> None:
        """Wait for those that are being started, once for each that failed: or they would be stopped again and again."""
        while self._starting:
            await self._wait_for_change(1.0)

    async def stop_unlent(self) -> None:
        """Those started here that do not lend their memory, since they failed: they begin anew when they are not paused."""
        unlent = [server for server in self.all if server.process is not None and not (server.ready and server.lends)]
        for server in unlent:
            await self.withdraw(server)
        await asyncio.gather(*(asyncio.to_thread(server.process.stop, False) for server in unlent if server.process))

    async def notify(self) -> None:
        """Wake whoever waits for a server."""
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait()

    async def _until_up(self, server: Server) -> None:
        if not await self._is_healthy(server, self.config.start_timeout):
            how = f"did not answer in sglang.start_timeout ({self.config.start_timeout:g} s)"
            raise EngineError(
                f"the SGLang server {server.url} {how if server.alive else 'ended while it started'}{server.log_tail()}"
            )
        server.info = await self.call(server, "/server_info", timeout=LOOK_SECONDS)

    async def _is_healthy(self, server: Server, patience: float) -> bool:
        """Whether it shows a sign of life within ``patience`` seconds; until it does, it gets no new requests."""
        until = time.monotonic() + patience
        while server.alive:
            left = until - time.monotonic()
            try:
                await self.call(server, "/health", timeout=max(0.1, min(LOOK_SECONDS, left)))
                if server.doubted:
                    server.doubted = False
                    await self.notify()
                return True
            except (*UNREACHED, ServerError):
                if left <= 0:
                    break
                server.doubted = True
            await asyncio.sleep(min(0.5, left))
        return False

    async def _watch(self, server: Server) -> None:
        """Look after one server for as long as the run lasts."""
        broken = False  # answers, but could not be brought to the current weights
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.health_every):
                    await server.suspected.wait()
            server.suspected.clear()
            if self.paused and (self.colocated or server.alive):
                continue  # a paused server answers no health check, and whoever has its memory still needs it
            asked = not broken and not server.lends  # one that still lends could not be told to go on
            healthy = asked and await self._is_healthy(server, self.config.health_timeout)
            if server.ready and (healthy or (self.paused and server.alive)):
                continue
            await self.withdraw(server)
            if not broken:
                self._starting.add(server)
            try:
                await self._revive(server, restart=not healthy)
                broken = False
            except (*UNREACHED, ServerError, EngineError):
                broken = True
            finally:
                self._starting.discard(server)

    async def _revive(self, server: Server, restart: bool) -> None:
        """Start it anew if it is ours, wait for it if not, and bring it to the current weights."""
        if (restart or server.lends) and server.process is not None:
            await asyncio.to_thread(server.process.stop, False)  # it may be stuck: it is asked nothing
            self._check_turn(server)
            server.process.start()
            server.lends = False
            self.restarts += 1
        await self._until_up(server)
        async with self.changing:
            await self.bring(server)
        self._check_turn(server)
        await self.serve(server)

    def _check_turn(self, server: Server) -> None:
        if self.paused and self.colocated:
            raise EngineError(f"the SGLang server {server.url} has to wait: the trainer has its GPUs")


async def _nothing(server: Server) -> None:
    pass


async def quietly(call: Coroutine[Any, Any, Any]) -> None:
    """For what a server that cannot be reached need not hear."""
    with contextlib.suppress(*UNREACHED, ServerError):
        await call


def planned(config: SGLang, args: dict[str, Any], logs: Path, gpus: bool) -> list[Server]:
    """The servers that ``config`` asks for on this machine; ``args`` are the run's, which its ``args`` win over.

    Nothing is started yet.
    """
    if config.urls:
        return [Server(url) for url in config.urls]
    ports = free_ports(config.servers) if config.port == 0 else range(config.port, config.port + config.servers)
    servers = []
    for index, port in enumerate(ports):
        gpu = config.first_gpu + index * config.tp
        process = LocalProcess(
            launch(config, args, logs / f"server-{index}.log", "127.0.0.1", port, gpu if gpus else None)
        )
        servers.append(Server(f"http://127.0.0.1:{port}", process, sees_files=True))
    return servers


def launch(config: SGLang, args: dict[str, Any], log: Path, host: str, port: int, gpu: int | None) -> Launch:
    """How to start a server that listens at ``host`` and ``port``, on the GPUs from ``gpu`` on, or on the CPU."""
    placed = CPU_ARGS if gpu is None else {"base-gpu-id": gpu}
    args = {"host": host, "port": port, "tp": config.tp} | placed | args
    return Launch(command(config, args), environment(config, gpu is not None), log)


def command(config: SGLang, args: dict[str, Any]) -> list[str]:
    """SGLang's command line: ``args``, and over them the arguments of ``config``."""
    words = [config.python or sys.executable, "-m", "sglang.launch_server"]
    given = {name.lstrip("-").replace("_", "-"): value for name, value in config.args.items()}
    for name, value in (args | given).items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", *(shlex.split(value) if isinstance(value, str) else [str(value)])]
    return words


def environment(config: SGLang, gpus: bool) -> dict[str, str]:
    """What a server's environment has beside ours."""
    env = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}  # its image features would outlive the weights
    return env | ({} if gpus else CPU_ENV) | config.env


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of this machine that nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
