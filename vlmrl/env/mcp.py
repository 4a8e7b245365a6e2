"""The tools of an MCP server as the tools of an env, by the official client: over HTTP, or with a server process per episode.

class BrowserEnv(McpEnv):
    def judge(self, response):
        return float(self.task.answer in response)

Config(env="browser.py:BrowserEnv", env_options={"server": "http://127.0.0.1:8931/mcp"}, ...)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sized
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from vlmrl.env.json_size import JsonSize
from vlmrl.env.mcp_stdio import is_readable, open_stdio
from vlmrl.env.tool_calls import Schema, tool_name
from vlmrl.env.tools import ToolEnv
from vlmrl.multimodal.images import MOST_PIXELS, DecodedImage, frozen_image
from vlmrl.types import Message, Task
from vlmrl.utils import command_guard
from vlmrl.utils.json_files import MAX_DIGITS
from vlmrl.utils.marked_processes import MARK, kill_marked
from vlmrl.utils.require import import_extra
from vlmrl.utils.work_pool import cpu_pool

DECODING_SECONDS = 60.0  # for the images of one result, without the time in the queue
MAX_ANSWER = 64 * 2**20  # bytes of one response; over HTTP, the client itself limits an event of a stream to 1 MiB
MAX_TEXT = 2**22  # characters of the texts of one result, about a million tokens
MAX_OBJECTS = 10_000  # in a response: the client checks each in the event loop, and takes 50 us for one that is wrong
MAX_VALUES = 100_000  # in a response, which holds the interpreter while it is parsed
MAX_LINES = 50_000  # of a stream, each of which is read in the event loop
INVALID_PARAMS = -32602  # JSON-RPC's code: some servers report the model's wrong arguments so, and not in a result
MAX_TOOLS = 1000  # and pages of them
MAX_COOKIES = 20  # of one server, in a session
MAX_WAITING = 100  # requests of a server that wait for their answers: the client has a task for each
GUARD_SECONDS = 1.0  # from SIGTERM to SIGKILL of a command; the client kills its guard after 2 s
RESUME_SECONDS = 1.0  # before a stream that ended is asked for again; a server may ask for no pause at all


class McpEnv(ToolEnv):
    """A :class:`~vlmrl.env.tools.ToolEnv` with the tools of ``server`` after its own ``functions``.

    ``server`` is an address (``http://127.0.0.1:8931/mcp``: all episodes share one server) or a command (``npx server``: one process
    per episode, which inherits few environment variables). Each env has its own session from ``reset`` to ``close``. The model reads
    the errors that a tool reports, and which of its images cannot be decoded. A server that fails is an env error.

    ``server_log`` is the file to which each process's stderr is appended (of a long one, the first MiB and the end); by default a
    temporary file, which errors name.
    """

    allowed: ClassVar[Collection[str] | None] = None
    """Names of the server's tools that the model may call; ``None``: all. A server that lacks one of them is an env error."""

    def __init__(self, task: Task, server: str, server_log: str | None = None) -> None:
        super().__init__(task)
        self.server = server
        self.server_log = Path(server_log).expanduser() if server_log else None
        self._served: set[str] = set()
        self._client: Any = None
        self._closing = asyncio.Event()
        self._refused = ""  # why the last response was not read
        self._holder: asyncio.Task[None] | None = None
        self._mark = uuid.uuid4().hex  # in the environment of a command and of all that it starts

    @classmethod
    def setup(cls, **options: Any) -> Any:
        library = import_extra("mcp", "mcp")  # fails at startup if it is missing
        for logger in (logging.getLogger("mcp"), import_extra("mcp.client.session", "mcp").logger):
            if logger.level == logging.NOTSET:  # they print a server's texts, with control characters, without an end
                logger.setLevel(logging.CRITICAL)
        return library

    def connection(self) -> Any:
        """The address, or the command's ``StdioServerParameters``.

        Override it to start a command in another folder or with environment variables.
        """
        if self.server.startswith(("http://", "https://")):
            return self.server
        command, *arguments = shlex.split(self.server)
        return import_extra("mcp", "mcp").StdioServerParameters(command=command, args=arguments)

    async def reset(self) -> list[Message] | None:  # type: ignore[override]
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(opened))
        self._client = await opened
        try:
            listed = await self._list_tools()
        except Exception as error:
            raise self._failure(", its tools", error) from error
        own = set(map(tool_name, type(self).tools))
        if lacking := sorted(set(self.allowed or ()) - own - set(map(tool_name, listed))):
            raise RuntimeError(
                f"MCP server {self.server} has no tool {', '.join(lacking)}, which {type(self).__name__}.allowed names; its tools are "
                f"{', '.join(map(tool_name, listed)):.2000}."
            )
        offered = [schema for schema in listed if tool_name(schema) not in own]
        served = [schema for schema in offered if self.allowed is None or tool_name(schema) in self.allowed]
        self._served = set(map(tool_name, served))
        self.tools = [*type(self).tools, *served]
        return None

    def find_function(self, name: str) -> Callable[..., Any]:
        return partial(self._call_tool, name) if name in self._served else super().find_function(name)

    async def close(self) -> None:  # type: ignore[override]
        if self._holder is None:
            return
        self._closing.set()
        if self._client is None:
            self._holder.cancel()  # it is still connecting
        try:
            await asyncio.wait([self._holder])
        finally:
            if not self._holder.done():  # closing took longer than a call may: the client gives a command six seconds
                kill_marked(self._mark)
            self._holder.cancel()

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Keep the session open. One task must enter and leave the client, but each method of an env runs in another task."""
        try:
            async with self._open_client() as client:
                client.session.validate_tool_result = _unchecked
                opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(self._failure("", error))

    @asynccontextmanager
    async def _open_client(self) -> AsyncIterator[Any]:
        mcp, connection = import_extra("mcp", "mcp"), self.connection()
        if not isinstance(connection, mcp.StdioServerParameters):
            http = import_extra("mcp.client.streamable_http", "mcp")
            headers = {"Accept-Encoding": "identity"}
            async with http.create_mcp_http_client(headers) as sender:
                sender.event_hooks = {"response": [partial(self._limit, sender.cookies.jar)]}
                async with mcp.Client(
                    _few_requests(http.streamable_http_client(connection, http_client=sender))
                ) as client:
                    yield client
            return
        self.server_log = self.server_log or _default_log()
        connection = _guarded(connection, self._mark)
        with self.server_log.open("ab", buffering=0) as log:
            try:
                async with mcp.Client(_few_requests(open_stdio(connection, log, self._refuses))) as client:
                    yield client
            finally:
                await asyncio.to_thread(kill_marked, self._mark)  # what a tool, such as a shell, left running

    def _failure(self, where: str, error: Exception) -> RuntimeError:
        """The error of a request. It names the limit that a response exceeded, which the client does not report."""
        log = f"; the server's stderr is in {self.server_log}" if self.server_log else ""
        return RuntimeError(f"MCP server {self.server}{where}: {self._refused or _reason(error)}{log}")

    async def _list_tools(self) -> list[Schema]:
        schemas, page = [], await self._client.list_tools()
        for _ in range(MAX_TOOLS):
            schemas += [_schema(tool) for tool in page.tools]
            if len(schemas) > MAX_TOOLS:
                break
            if not page.next_cursor:
                return schemas
            page = await self._client.list_tools(cursor=page.next_cursor)
        raise RuntimeError(f"it has more than {MAX_TOOLS} tools, or pages of them")

    async def _call_tool(self, name: str, /, **arguments: Any) -> Any:
        self._refused = ""
        try:
            result = await self._client.call_tool(name, arguments)
            content = await cpu_pool().run(DECODING_SECONDS, _content, result)
        except Exception as error:  # also a ValueError, which would be shown to the model
            text = str(getattr(error, "message", ""))
            if getattr(error, "code", None) == INVALID_PARAMS and len(text) <= MAX_TEXT:
                raise ValueError(text or "the arguments are invalid.") from error
            raise self._failure(f", tool {name}", error) from error
        if result.is_error:
            texts = [content] if isinstance(content, str) else [item for item in content if isinstance(item, str)]
            raise ValueError("\n".join(texts) or "the tool failed.")
        return content

    def _refuses(self, size: JsonSize) -> bool:
        """Whether a message of a command is over a limit; the session ends with it."""
        if excess := _excess(size):
            self._refused = f"its answer has more than {excess}"
        return bool(excess)

    async def _limit(self, cookies: Sized, response: Any) -> None:
        """Make a response fail, when it is read, if it is compressed or over a limit; of a stream, all events together.

        The stream that a server may send messages of its own on is refused, as an env reads none: the client would open it again and
        again. A response's stream that ended is resumed after a pause. It is UTF-8, whatever its header says: reading the charset out
        of a long header takes quadratic time, and so does decoding some charsets, such as punycode.
        """
        library = import_extra("mcp.client.streamable_http", "mcp").httpx2  # the client's
        encoding, kind = (response.headers.get(name, "") for name in ("Content-Encoding", "Content-Type"))
        is_stream = kind.lower().startswith("text/event-stream")
        original, size = response.aiter_raw, JsonSize(is_stream)
        response.encoding = "utf-8"

        def refuse(why: str) -> None:
            self._refused = why  # the client does not report why a stream ended
            raise library.StreamError(why)

        if len(cookies) > MAX_COOKIES:  # each later request would take the time to choose among them
            refuse(f"it has set more than {MAX_COOKIES} cookies")

        if response.request.method == "GET":
            if "Last-Event-ID" not in response.request.headers:
                raise library.StreamError("an env reads no stream of the server's own")
            await asyncio.sleep(RESUME_SECONDS)

        async def limited(chunk_size: int | None = None) -> AsyncIterator[bytes]:
            if encoding not in ("", "identity"):
                refuse(f"it is compressed ({encoding:.50}), although the request forbids that")
            parts: list[bytes] = []
            async for part in original(chunk_size):
                size.add(part)
                if excess := _excess(size):
                    refuse(f"it has more than {excess}")
                if not is_stream:
                    parts.append(part)
                yield part
                await asyncio.sleep(0)  # more of it may have arrived, in tiny chunks: others come first
            if not is_stream and not is_readable(b"".join(parts)):
                refuse("it is no message of JSON-RPC")

        response.aiter_raw = limited


@asynccontextmanager
async def _few_requests(transport: Any) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a ``transport``, which is not read while MAX_WAITING requests of its server wait for their answers."""
    waiting = asyncio.Semaphore(MAX_WAITING)
    async with transport as (received, sent):
        yield _Received(received, waiting), _Sent(sent, waiting)


class _Stream:
    """A stream of a session. Each request of its server takes a place in ``waiting`` until its answer is sent."""

    def __init__(self, stream: Any, waiting: asyncio.Semaphore) -> None:
        self._stream = stream
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.aclose()


class _Received(_Stream):
    def __aiter__(self) -> _Received:
        return self

    async def __anext__(self) -> Any:
        message = await self._stream.__anext__()
        content = getattr(message, "message", None)  # or it is an error
        if hasattr(content, "method") and hasattr(content, "id"):
            await self._waiting.acquire()
        return message


class _Sent(_Stream):
    async def send(self, message: Any) -> None:
        await self._stream.send(message)
        if not hasattr(message.message, "method"):  # an answer
            self._waiting.release()


def _guarded(connection: Any, mark: str) -> Any:
    """The command under a guard, which ends with it what it started, also processes that do not have its environment any more."""
    environment = connection.env or {}
    program = Path(connection.cwd or "") / connection.command if os.sep in connection.command else connection.command
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(f"{connection.command!r} is no program that can be run")
    guard = ["-I", "-S", command_guard.__file__, str(GUARD_SECONDS), command_guard.INPUT]
    arguments = [*guard, connection.command, *connection.args]
    return connection.model_copy(
        update={"command": sys.executable, "args": arguments, "env": {**environment, MARK: mark}}
    )


async def _unchecked(name: str, result: Any) -> None:
    """In place of the client's check of a result by the tool's output schema: the model reads any result, and a pattern of the
    server's (``^(a+)+$``) would hold up the event loop, and so all async envs."""


def _excess(size: JsonSize) -> str:
    """The limit that a response exceeds, or ``""``: ``10000 objects``."""
    limits = [(size.bytes, MAX_ANSWER, "bytes"), (size.values, MAX_VALUES, "values")]
    limits += [(size.objects, MAX_OBJECTS, "objects"), (size.lines, MAX_LINES, "lines")]
    if size.long_numbers:
        return f"{MAX_DIGITS} digits in a number"
    return next((f"{most} {unit}" for count, most, unit in limits if count > most), "")


@cache
def _default_log() -> Path:
    """One temporary file for all servers of this process."""
    handle, name = tempfile.mkstemp(prefix="vlmrl-mcp-", suffix=".log")
    os.close(handle)
    return Path(name)


def _schema(tool: Any) -> Schema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _content(result: Any) -> Any:
    """A tool's result as text, or as a list of texts and images. Raises ValueError if they exceed MAX_TEXT or MOST_PIXELS."""
    items, values, characters = [], 0, 0
    for item in (item for block in result.content for item in _items(block)):
        items.append(item)
        values += item.pixels.size if isinstance(item, DecodedImage) else 0
        characters += len(item) if isinstance(item, str) else 0
        if values > 3 * MOST_PIXELS:
            raise ValueError(f"its images have more than {MOST_PIXELS} pixels in all")
        if characters > MAX_TEXT:
            raise ValueError(f"its texts have more than {MAX_TEXT} characters in all")
    if not items and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
        if len(text) > MAX_TEXT:
            raise ValueError(f"its structured content has more than {MAX_TEXT} characters")
        return text
    return "\n".join(items) if all(isinstance(item, str) for item in items) else items


def _items(block: Any) -> list[Any]:
    """A block of a result as texts and images. What cannot be shown is named; a resource keeps its URI."""
    if block.type == "text":
        return [block.text]
    if block.type == "image":
        return [_image(block.mime_type, block.data)]
    if block.type == "resource_link":
        about = ". ".join(text for text in (block.title or block.name, block.description) if text)
        return [f"[resource {_named(block.uri, block.mime_type)}: {about}]"]
    if block.type == "resource":
        resource = block.resource
        label = f"[resource {_named(resource.uri, resource.mime_type)}]"
        if hasattr(resource, "text"):
            return [f"{label}\n{resource.text}"]
        is_image = (resource.mime_type or "").startswith("image/")
        return [label, _image(resource.mime_type, resource.blob)] if is_image else [label]
    return [f"[{_named(block.type, getattr(block, 'mime_type', None))}]"]  # audio


def _named(name: str, mime_type: str | None) -> str:
    return f"{name}, {mime_type}" if mime_type else name


def _image(mime_type: str, data: str) -> Any:
    """The image, or a text for the model if it cannot be decoded. The text is the same in a replay, unlike the decoder's own."""
    try:
        return frozen_image(f"data:{mime_type};base64,{data}")
    except ValueError:
        return f"[{_named('image', mime_type)}: it cannot be decoded]"


def _reason(error: Any) -> str:
    """The first error inside nested exception groups, whose own texts say little."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not hasattr(error, "error_count"):
        return f"{type(error).__name__}: {error}"
    # The text of an error of Pydantic copies the server's answer many times, which blocks all episodes for seconds.
    first = error.errors(include_url=False, include_context=False, include_input=False)[:3]
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in first)
