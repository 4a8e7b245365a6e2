"""Runs the agents of a run: async functions in one event loop of their own, plain functions in threads, commands in processes.

    agents = Agents(resolve_agent(config), config.gateway, config.folder / "agents")
    client = await agents.server.open(episode)
    result = await agents.run(task, client, trajectory.id)      # AgentError: it failed
    agents.close()

No agent runs on the run's own loop, so an agent that blocks its thread harms no engine and no trainer.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any
from urllib.parse import urlsplit

from vlmrl.config import Config, Gateway, name_of
from vlmrl.config.code import resolve_function
from vlmrl.config.fields import is_command
from vlmrl.engine.server import TOKEN_VARIABLE
from vlmrl.gateway.agent_client import AgentClient
from vlmrl.gateway.agent_command import AgentCommands
from vlmrl.gateway.command_log import CommandLogs
from vlmrl.gateway.gateway_server import GatewayServer
from vlmrl.gateway.task_messages import write_task
from vlmrl.types import Task, Trajectory
from vlmrl.utils.command_guard import delete_all
from vlmrl.utils.threads import DaemonPool
from vlmrl.utils.user_loop import UserLoop
from vlmrl.utils.users_line import text_of, users_line
from vlmrl.utils.work_pool import cpu_pool

ERROR_CHARACTERS = 2000
NAME_CHARACTERS = 80  # of a command, which may be a script for `sh -c`
WRITE_SECONDS = 60.0  # for a task's images


class AgentError(Exception):
    """The agent failed: an exception, an exit status, or no end in time."""


@dataclass(frozen=True)
class AgentSpec:
    """A checked agent: its ``function`` or the words of its ``command``."""

    name: str
    function: Callable[..., Any] | None = None
    command: tuple[str, ...] = ()
    reward: Callable[[Trajectory], Any] | None = None
    """Computes the reward of a trajectory. None: the agent returns it or posts it."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004  an object with an async __call__
        )


def resolve_agent(config: Config) -> AgentSpec | None:
    """The agent of a run, ``None`` if it has none. Raises ValueError if it does not exist or cannot be called."""
    if not config.has_agent:
        return None
    if isinstance(config.reward, tuple | dict):
        raise ValueError(f"reward must be one function with an agent, but it is {config.reward!r}.")
    reward = None if config.reward is None else resolve_function("reward", config.reward, ["trajectory"])
    if is_command(config.agent):
        words = tuple(shlex.split(config.agent))
        if shutil.which(words[0]) is None:
            remedy = f" Make it executable: chmod +x {words[0]}" if Path(words[0]).is_file() else ""
            raise ValueError(f"agent must begin with a program that can be run, but it is {words[0]!r}.{remedy}")
        name = shlex.join(Path(word).name for word in words)
        return AgentSpec(f"{name:.{NAME_CHARACTERS}}", command=words, reward=reward)
    assert config.agent is not None
    function = resolve_function("agent", config.agent, ["task", "client"])
    return AgentSpec(name_of(function), function, reward=reward)


class Agents:
    """Runs the agents of one run against its endpoint, ``server``. Logs of commands are ``logs/TRAJECTORY.log``."""

    def __init__(self, spec: AgentSpec, settings: Gateway, logs: Path) -> None:
        self.spec = spec
        self._settings = settings
        self._loop = UserLoop("agents")
        self._commands = AgentCommands() if spec.command else None
        self._logs = CommandLogs(logs)
        if self._commands is not None:  # file URLs in a task's messages name images there
            settings = replace(settings, images=(*settings.images, str(self._commands.folder)))
        self.server = GatewayServer(settings)

    async def run(self, task: Task, client: AgentClient, trajectory_id: str) -> Any:
        """Run the agent to its end. Returns what it returns; a command returns None.

        Raises:
            AgentError: it failed; the message says how, without its name.
        """
        seconds = self._settings.agent_timeout
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await self._run(task, client, trajectory_id)
        except TimeoutError as error:
            if not deadline.expired():
                raise AgentError(_described(error)) from error
            hint = ""
            if await self._loop.replace_if_blocked():
                hint = (
                    " An agent blocks the event loop of all async agents: make it a plain function, not an async one."
                )
            raise AgentError(f"no end within gateway.agent_timeout ({seconds:g} s).{hint}") from error
        except AgentError:
            raise
        except asyncio.CancelledError as error:
            task_here = asyncio.current_task()
            if task_here is not None and task_here.cancelling():  # the run ends it
                raise
            raise AgentError("it cancelled itself.") from error
        except Exception as error:
            raise AgentError(_described(error)) from error

    def close(self) -> None:
        """End the server and all agents: commands are killed, async functions cancelled; threads end with the process."""
        if self._commands is not None:
            self._commands.close()
        self._loop.close()
        self.server.close()

    async def _run(self, task: Task, client: AgentClient, trajectory_id: str) -> Any:
        if self.spec.command:
            return await self._run_command(task, client, trajectory_id)
        assert self.spec.function is not None
        call = partial(self.spec.function, task, client)
        if self.spec.is_async:
            return await self._loop.run(_await(call(), client))
        thread = DaemonPool("agent")
        try:
            result = await thread.run(_call, call, client)
        finally:
            thread.close()
        return await self._loop.run(_await(result, client)) if inspect.isawaitable(result) else result

    async def _run_command(self, task: Task, client: AgentClient, trajectory_id: str) -> None:
        assert self._commands is not None
        folder = self._commands.new_folder()
        log = self._logs.open(trajectory_id)
        try:
            file = await cpu_pool().run(WRITE_SECONDS, write_task, task, folder)
            environment = _environment(client, file)
            status = await self._commands.run(self.spec.command, folder, environment, log)
        finally:
            tail = log.close()
            asyncio.get_running_loop().run_in_executor(None, delete_all, folder)  # it may hold 100,000 files
        if status != 0:
            how = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
            raise AgentError(f"{how}" + (f"; the end of its output:\n{tail}" if tail else ", without any output"))


def _environment(client: AgentClient, task_file: Path) -> Mapping[str, str]:
    """The environment of a command: this process's without the servers' token, the endpoint and the task. No proxy is used for the
    endpoint."""
    host = urlsplit(client.base_url).hostname or ""
    direct = {name: ",".join(filter(None, [os.environ.get(name), host])) for name in ("NO_PROXY", "no_proxy")}
    own = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return own | direct | client.environment | {"VLMRL_TASK": str(task_file), "PYTHONUNBUFFERED": "1"}


def _call(function: Callable[[], Any], client: AgentClient) -> Any:
    """Call an agent, then close its clients. What a decorated async function returns is still to be awaited."""
    result = None
    try:
        result = function()
    finally:
        if not inspect.isawaitable(result):
            client.close()
    return result


async def _await(value: Awaitable[Any], client: AgentClient) -> Any:
    """Await an agent, then close its clients."""
    try:
        return await value
    finally:
        await client.close_all()


def _described(error: BaseException) -> str:
    """An exception of an agent, with the user's line that raised it, or else the last one; of a task group, its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [f"{each.filename}, line {each.lineno}, in {each.name}" for each in extract_tb(error.__traceback__)]
    place = users_line(error) or "".join(frames[-1:])
    return f"{type(error).__name__}: {text_of(error):.{ERROR_CHARACTERS}}" + (f" ({place})" if place else "")
