"""Connects to an MCP server that is a command: one message a line on its standard input and output, read within limits.

The package's own client copies all of a message again for each 64 KiB of it: an answer of 50 MB, such as a log that a tool reads, kept
the event loop of all episodes busy for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from subprocess import PIPE
from typing import Any, BinaryIO

from vlmrl.env.json_size import JsonSize
from vlmrl.utils.require import import_extra

READ_BYTES = 65536
LONG_TEXT = 2**20  # bytes of a message
MOST_LOGGED = 2**20  # bytes of the beginning of a command's stderr, which a tool may write without end
LOG_SECONDS = 1.0  # for the last of it to arrive when the command has ended
STOP_SECONDS = 2.0  # for a command to end after its input has, and again after SIGTERM


@asynccontextmanager
async def open_stdio(
    parameters: Any, log: BinaryIO, refuses: Callable[[JsonSize], bool]
) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a session with the command of ``StdioServerParameters``, the beginning and end of whose stderr go to ``log``.

    The session's connection ends with the command, and with a message whose size ``refuses`` is true for.
    """
    stdio = import_extra("mcp.client.stdio", "mcp")
    anyio = stdio.anyio
    process = await asyncio.create_subprocess_exec(
        parameters.command,
        *parameters.args,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=parameters.cwd,
        env=stdio.get_default_environment() | (parameters.env or {}),
        start_new_session=True,
    )
    received, for_session = anyio.create_memory_object_stream(0)
    from_session, sent = anyio.create_memory_object_stream(0)
    tasks = [
        asyncio.create_task(_read(process.stdout, received, refuses)),
        asyncio.create_task(_write(process.stdin, sent, received)),
    ]
    copying = asyncio.create_task(_append(process.stderr, log))
    try:
        yield for_session, from_session
    finally:
        try:
            with anyio.CancelScope(shield=True):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for stream in (received, for_session, from_session, sent):
                    stream.close()
                await _stop(process)
                await asyncio.wait({copying}, timeout=LOG_SECONDS)
        finally:
            copying.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # what has inherited the pipes may keep them open


async def _append(stderr: Any, log: BinaryIO) -> None:
    """Append the first MOST_LOGGED bytes of ``stderr`` to ``log``, and at its end the last READ_BYTES or so of the rest."""

    def write(part: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk: the log is not worth the episode
            log.write(part)

    left, last = MOST_LOGGED, b""
    while part := await stderr.read(READ_BYTES):
        write(part[:left])
        last = (last + part[left:])[-READ_BYTES:]
        left = max(0, left - len(part))
    if last:
        write(b"\n[...]\n" + last)


async def _read(stdout: Any, received: Any, refuses: Callable[[JsonSize], bool]) -> None:
    """Pass on the messages, up to the end of the command or to one that is refused."""
    stdio = import_extra("mcp.client.stdio", "mcp")
    parts: list[bytes] = []
    size = JsonSize()
    async with received:
        while chunk := await stdout.read(READ_BYTES):
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                size.add(end)
                if refuses(size):
                    return
                message = _message(stdio, b"".join([*parts, end]))
                parts, size = [], JsonSize()
                await received.send(message)
            parts.append(rest)
            size.add(rest)
            if refuses(size):
                return


def is_readable(text: bytes) -> bool:
    """Whether a text is a message of the protocol. Short texts are not checked here, since the client checks each message.

    Its error for an invalid message copies the message many times, which blocks all episodes for seconds if the message is long.
    """
    if len(text) <= LONG_TEXT:
        return True
    try:
        import_extra("mcp.types", "mcp").jsonrpc_message_adapter.validate_python(json.loads(text), by_name=False)
    except (ValueError, RecursionError):
        return False
    return True


def _message(stdio: Any, line: bytes) -> Any:
    """The message of a line, or the error of one that cannot be read."""
    if not is_readable(line):
        return ValueError("it is no message of JSON-RPC")
    try:
        return stdio.SessionMessage(stdio.types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _write(stdin: Any, sent: Any, received: Any) -> None:
    try:
        async for message in sent:
            text: str = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(f"{text}\n".encode())
            await stdin.drain()
    finally:
        received.close()  # a session whose server reads nothing any more has ended


async def _stop(process: Any) -> None:
    """End the command: its input ends, then it gets SIGTERM, then SIGKILL."""
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _has_ended(process):
            break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    else:
        await _has_ended(process)


async def _has_ended(process: Any) -> bool:
    """Whether it ends in time. Not by ``wait``, which also waits for all that have inherited its pipes."""
    until = time.monotonic() + STOP_SECONDS
    while process.returncode is None and time.monotonic() < until:
        await asyncio.sleep(0.01)
    return process.returncode is not None
