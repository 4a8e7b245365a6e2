"""What the tests of browser envs share: calls of computer_use, sessions on pages, and the processes of Chromium."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vlmrl import BrowserEnv, MiniWobEnv
from vlmrl.env.base import Env, resolve_env
from vlmrl.types import Task


def call(action: str, **arguments: Any) -> str:
    """A response with one call of computer_use."""
    body = {"name": "computer_use", "arguments": {"action": action, **arguments}}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


def click(x: float, y: float) -> str:
    """A response that clicks at a point, in thousandths."""
    return call("left_click", coordinate=[x, y])


def page_env(folder: Path, html: str, reward_script: str = "window.reward", **attributes: Any) -> type[Env]:
    """A class of envs on a page with this body."""
    path = folder / "page.html"
    path.write_text(f"<!DOCTYPE html><html><body style='margin:0'>{html}</body></html>")
    return type("PageEnv", (BrowserEnv,), {"page": str(path), "reward_script": reward_script, **attributes})


@asynccontextmanager
async def opened(
    env_class: Any, seed: int = 0, prompt: str = "Go.", data: Any = None, **options: Any
) -> AsyncIterator[Any]:
    """An env after its reset; ``env.prompt`` are the messages that it returned."""
    sizes = {} if issubclass(env_class, MiniWobEnv) else {"width": 200, "height": 100}
    spec = resolve_env(env_class, options=sizes | options)
    env: Any = spec.build(Task("t", [{"role": "user", "content": prompt}], seed=seed, data=data or {}))
    try:
        env.prompt = await env.reset()
        yield env
    finally:
        await env.close()


def shown(observation: dict[str, Any]) -> bytes:
    """The screenshot of an observation."""
    (image,) = observation["multi_modal_data"]["image"]
    return image


def processes(parent: int | None = None) -> list[int]:
    """The running processes below ``parent``, by default this one, that are Chromium or Playwright's driver."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    children: dict[int, list[tuple[int, str]]] = {}
    for pid in pids:
        line, state, above = _describe(pid)
        if state not in ("Z", ""):
            children.setdefault(above, []).append((pid, line))
    found, todo = [], [os.getpid() if parent is None else parent]
    while todo:  # a child's number may be below its parent's: numbers are given again
        for pid, line in children.get(todo.pop(), []):
            todo.append(pid)
            if "chromium" in line or "run-driver" in line:
                found.append(pid)
    return sorted(found)


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent."""
    return _describe(pid)[1] not in ("Z", "")


def _describe(pid: int) -> tuple[str, str, int]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = re.match(r".*\) (\S) (\d+) ", Path(f"/proc/{pid}/stat").read_text(), re.DOTALL)
    except OSError:
        return "", "", 0
    return (line, state[1], int(state[2])) if state else ("", "", 0)
