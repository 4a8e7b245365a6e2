"""The tools of an MCP server as the tools of an env, by the official client: over HTTP, or with a server process per episode.

class BrowserEnv(McpEnv):
    def judge(self, reply):
        return float(self.task.answer in reply)

Config(env="browser.py:BrowserEnv", env_options={"server": "http://127.0.0.1:8931/mcp"}, ...)
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar

from vlmrl.config.code import import_extra
from vlmrl.env.tools import Schema, ToolEnv, tool_name
from vlmrl.multimodal.images import load_image
from vlmrl.types import Message, Task


class McpEnv(ToolEnv):
    """A :class:`~vlmrl.env.tools.ToolEnv` with the tools of ``server`` after its own ``functions``.

    ``server`` is an address (``http://127.0.0.1:8931/mcp``: all episodes share one server) or a command (``npx server``: one process
    per episode, which inherits few environment variables). Each env has its own session from ``reset`` to ``close``. The model reads
    the errors that a tool reports. A server that fails or cannot be reached is an env error.
    """

    allowed: ClassVar[Collection[str] | None] = None
    """Names of the server's tools that the model may call; ``None``: all."""

    def __init__(self, task: Task, server: str) -> None:
        super().__init__(task)
        self.server = server
        self._served: set[str] = set()
        self._client: Any = None
        self._closing = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    @classmethod
    def setup(cls, **options: Any) -> Any:
        return import_extra("mcp", "mcp")  # fails at startup if it is missing

    def connection(self) -> Any:
        """The argument of ``mcp.Client``. Override it to start a command in another folder or with environment variables."""
        if self.server.startswith(("http://", "https://")):
            return self.server
        command, *arguments = shlex.split(self.server)
        return import_extra("mcp", "mcp").StdioServerParameters(command=command, args=arguments)

    async def reset(self) -> list[Message] | None:  # type: ignore[override]
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(opened))
        self._client = await opened
        own = set(map(tool_name, type(self).tools))
        offered = [schema for schema in await self._list_tools() if tool_name(schema) not in own]
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
            self._holder.cancel()

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Keep the session open. One task must enter and leave the client, but each method of an env runs in another task."""
        try:
            async with import_extra("mcp", "mcp").Client(self.connection()) as client:
                opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(RuntimeError(f"MCP server {self.server}: {_reason(error)}"))

    async def _list_tools(self) -> list[Schema]:
        schemas, page = [], await self._client.list_tools()
        while True:
            schemas += [_schema(tool) for tool in page.tools]
            if not page.next_cursor:
                return schemas
            page = await self._client.list_tools(cursor=page.next_cursor)

    async def _call_tool(self, name: str, /, **arguments: Any) -> Any:
        try:
            result = await self._client.call_tool(name, arguments)
            content = _content(result)
        except Exception as error:  # also a ValueError, which would be shown to the model
            raise RuntimeError(f"MCP server {self.server}, tool {name}: {_reason(error)}") from error
        if result.is_error:
            raise ValueError(content if isinstance(content, str) else "the tool failed.")
        return content


def _schema(tool: Any) -> Schema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _content(result: Any) -> Any:
    """A tool's result as text, or as a list of texts and images."""
    items = [_item(block) for block in result.content]
    if not items and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(items) if all(isinstance(item, str) for item in items) else items


def _item(block: Any) -> Any:
    if block.type == "text":
        return block.text
    if block.type == "image":
        return load_image(f"data:{block.mime_type};base64,{block.data}")
    if block.type == "resource" and hasattr(block.resource, "text"):
        return block.resource.text
    return f"[{block.type}]"  # audio and links


def _reason(error: BaseException) -> str:
    """The first error inside nested exception groups, whose own texts say little."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
