"""Runs the commands of agents, each in its own folder, under a guard that also ends all processes it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmrl.gateway.command_log import CommandLog
from vlmrl.utils import command_guard
from vlmrl.utils.marked_processes import MARK, kill_marked

KILL_SECONDS = 5.0  # from SIGTERM to SIGKILL
READ_BYTES = 65536
LAST_READS = 32  # a pipe holds 1 MiB at most


class AgentCommands:
    """The commands that run now. ``folder`` holds a folder for each of them; :meth:`close` ends and deletes everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="vlmrl-agents-"))
        self._lifelines: set[int] = set()  # the guards' standard inputs, which end with this process

    def new_folder(self) -> Path:
        """A new empty folder for one command."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    async def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: CommandLog) -> int:
        """Run ``command`` to its end. Returns its exit status, negative for a signal. Cancellation ends it: SIGTERM, then SIGKILL.

        Processes that it started and that are still there when it has ended are killed.
        """
        (reader, writer), (alive, lifeline) = os.pipe(), os.pipe()
        os.set_blocking(reader, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(reader, _drain, reader, log)
        self._lifelines.add(lifeline)
        mark = uuid.uuid4().hex  # a command may kill its guard
        guard = [sys.executable, "-I", "-S", command_guard.__file__, str(KILL_SECONDS)]
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *guard,
                    *command,
                    cwd=folder,
                    env={**environment, MARK: mark},
                    stdin=alive,
                    stdout=writer,
                    stderr=writer,
                    start_new_session=True,  # Ctrl-C does not reach it
                )
            finally:
                os.close(writer)
                os.close(alive)
            try:
                return await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # the command may have stopped its parent
                await process.wait()
                await asyncio.to_thread(kill_marked, mark)
        finally:
            if lifeline in self._lifelines:
                self._cut(lifeline)
            loop.remove_reader(reader)
            _drain(reader, log, LAST_READS)
            os.close(reader)

    def close(self) -> None:
        """Kill what is still there, and delete the folder."""
        for lifeline in tuple(self._lifelines):
            self._cut(lifeline)
        command_guard.delete_all(self.folder)

    def _cut(self, lifeline: int) -> None:
        self._lifelines.discard(lifeline)
        os.close(lifeline)


def _drain(reader: int, log: CommandLog, reads: int = 1) -> None:
    """Move output from the pipe to the log, as far as there is any: one read at a time, so that a flood does not stop the loop."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(reads):
            output = os.read(reader, READ_BYTES)
            if not output:
                asyncio.get_running_loop().remove_reader(reader)  # at its end a pipe is always readable
                return
            log.write(output)
