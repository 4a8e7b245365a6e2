"""What the tests of browser envs share: calls of computer_use, sessions on pages, and the processes of Chromium."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Collection
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


def processes(parent: int | None = None, but: Collection[int] = ()) -> dict[int, int]:
    """The running processes below ``parent``, by default this one, that are Chromium or Playwright's driver, for :func:`left_of`.

    Those of ``but`` and what they have started since are left out.
    """
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    children: dict[int, list[tuple[int, str]]] = {}
    for pid in pids:
        line, state, above, _ = _describe(pid)
        if state not in ("Z", ""):
            children.setdefault(above, []).append((pid, line))
    found, todo = [], [os.getpid() if parent is None else parent]
    while todo:  # a child's number may be below its parent's: numbers are given again
        for pid, line in children.get(todo.pop(), []):
            if pid in but:
                continue
            todo.append(pid)
            if "chromium" in line or "run-driver" in line:
                found.append(pid)
    return {pid: started(pid) for pid in sorted(found)}


def started(pid: int) -> int:
    """When a process started, in the kernel's ticks."""
    return _describe(pid)[3]


def left_of(found: dict[int, int]) -> list[int]:
    """The processes, with the times of their starts, that still run: one that has ended may wait for its parent.

    The time is compared since a number is given again, within minutes where tests start many processes and threads.
    """
    seen = {pid: _describe(pid) for pid in found}
    return [pid for pid, (_, state, _, start) in seen.items() if state not in ("Z", "") and start == found[pid]]


def _describe(pid: int) -> tuple[str, str, int, int]:
    """A process's command line, state, parent and start; of one that has ended, empty."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", "", 0, 0
    return line, fields[0], int(fields[1]), int(fields[19])
