"""A small MCP server for the tests: over stdio as a program, over HTTP when a test serves its app."""

import base64
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, CallToolResult, ImageContent, TextContent
from PIL import Image as Pillow

server = MCPServer("paint", log_level="CRITICAL")


@server.tool()
def paint(color: str, side: int = 64) -> list:
    """Paint a square."""
    if color == "none":
        raise ToolError("none is no color")
    buffer = io.BytesIO()
    Pillow.new("RGB", (side, 32), color).save(buffer, format="PNG")
    return [f"{color}:", Image(data=buffer.getvalue(), format="png")]


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def whoami() -> str:
    """The id of the server process."""
    return str(os.getpid())


@server.tool()
def leave(bare: bool = False) -> str:
    """Leave a process behind, as a shell's `setsid sleep 3600 &` does; its id. A bare one has no environment, as many daemons."""
    command, none = ["env", "-i"] * bare + ["sleep", "3600"], subprocess.DEVNULL
    return str(subprocess.Popen(command, start_new_session=True, stdin=none, stdout=none, stderr=none).pid)


@server.tool()
def vanish(marker: str) -> str:
    """End the process unless the marker file exists."""
    if Path(marker).exists():
        return "still here"
    Path(marker).touch()
    os._exit(3)


@server.tool()
def hang(marker: str) -> str:
    """Write the process id to a file, then hang."""
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)
    return "late"


@server.tool()
def odd() -> CallToolResult:
    """An image with a wrong checksum, and writes a line to stderr."""
    print("the painter spilled a bucket", file=sys.stderr, flush=True)
    buffer = io.BytesIO()
    Pillow.new("RGB", (64, 32), "red").save(buffer, format="PNG")
    broken = bytearray(buffer.getvalue())
    broken[broken.index(b"IDAT") + 6] ^= 0xFF
    data = base64.b64encode(bytes(broken)).decode()
    blocks = [TextContent(text="here:"), ImageContent(data=data, mime_type="image/png")]
    return CallToolResult(content=blocks)


@server.tool()
def divide(a: int, b: int) -> int:
    """Divide, and refuse 0 as an error of the protocol."""
    if b == 0:
        raise MCPError(INVALID_PARAMS, "b must not be 0")
    if b < 0:
        raise MCPError(INTERNAL_ERROR, "no space left")
    return a // b


if __name__ == "__main__":
    stays = "--stay" in sys.argv
    if stays:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run()
    while stays:
        signal.pause()
