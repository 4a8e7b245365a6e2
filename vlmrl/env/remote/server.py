"""`vlmrl env serve`: an env as a server. Each session is one env that is being played; see `client.py` for the other end.

PUT    /sessions/ID           builds the env of a task and resets it: its first messages, its tools
POST   /sessions/ID/step      one reply: messages, done, reward, metrics
POST   /sessions/ID/finish    the final reward
DELETE /sessions/ID           closes it
GET    /health                the env's name, its tools, the number of sessions
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tyro

from vlmrl.config import Options
from vlmrl.config.code import import_extra
from vlmrl.env.base import EnvSpec, RetryTurn, resolve_env
from vlmrl.env.remote.serialize import task_from_wire, to_wire
from vlmrl.env.session import EnvContractError, EnvSession


@dataclass(frozen=True)
class ServeArguments:
    env: tyro.conf.Positional[str]
    """`module:Name` or `file.py:Name`."""
    env_options: Options = field(default_factory=dict)
    host: str = "127.0.0.1"
    """The address to listen on. Anybody who reaches it may play: there is no password."""
    port: int = 8100
    timeout: float = 45.0
    """Seconds that one call of an env may take."""
    idle_timeout: float = 1800.0
    """Seconds after which a session is closed that nobody asked for: more than any reply of the model takes."""
    max_sessions: int = 4096


@dataclass
class _Played:
    """A session, and when it was last asked."""

    session: EnvSession
    used: float = field(default_factory=time.monotonic)
    busy: int = 0


class EnvServer:
    """The sessions of one env. ``timeout`` is for a call of the env, ``idle_timeout`` for a session that nobody asks, in seconds."""

    def __init__(
        self, spec: EnvSpec, *, timeout: float = 45.0, idle_timeout: float = 1800.0, max_sessions: int = 4096
    ) -> None:
        self.spec = spec
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.max_sessions = max_sessions
        self.sessions: dict[str, _Played] = {}

    async def start(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        if name in self.sessions or len(self.sessions) >= self.max_sessions:
            raise RuntimeError(f"session {name} is there already, or there are {self.max_sessions} sessions.")
        session = EnvSession(
            self.spec,
            task_from_wire(asked["task"]),
            max_turns=asked["max_turns"],
            timeout=self.timeout,
            max_retries=0,  # who plays decides about another attempt
            tool_format=asked["tool_format"] or "json",
        )
        self.sessions[name] = _Played(session)
        messages = await self._use(name, lambda session: session.start())
        return {
            "messages": to_wire(messages, "messages"),
            "tools": session.tools,
            "replayable": session.replayable,
        }

    async def step(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        result = await self._use(name, lambda session: session.step(asked["reply"]))
        return {
            "messages": to_wire(result.messages, "messages"),
            "done": result.done,
            "reward": result.reward,
            "metrics": result.metrics,
        }

    async def finish(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        ending, reply, turn = asked["ending"], asked["last_reply"], asked["last_turn"]
        return {"reward": await self._use(name, lambda session: session.finish(ending, reply, turn))}

    async def close(self, name: str) -> dict[str, Any]:
        """Closes a session, or lets go of one in which a call is still under way."""
        played = self.sessions.pop(name, None)
        if played is not None:
            await (played.session.abandon() if played.busy else played.session.close())
        return {}

    async def close_idle(self) -> None:
        oldest = time.monotonic() - self.idle_timeout
        idle = [name for name, played in self.sessions.items() if not played.busy and played.used < oldest]
        await asyncio.gather(*map(self.close, idle))

    async def close_all(self) -> None:
        await asyncio.gather(*map(self.close, list(self.sessions)))

    async def _use(self, name: str, call: Callable[[EnvSession], Awaitable[Any]]) -> Any:
        """One call of a session. After an error, which leaves no env behind, there is no such session any more."""
        played = self.sessions.get(name)
        if played is None:
            raise RuntimeError(
                f"there is no session {name}: it was closed, has failed, or was idle for {self.idle_timeout:g} s."
            )
        played.busy += 1
        try:
            return await call(played.session)
        except RetryTurn:
            raise
        except Exception:
            self.sessions.pop(name, None)
            await played.session.close()
            raise
        finally:
            played.busy -= 1
            played.used = time.monotonic()


def create_app(server: EnvServer) -> Any:
    """The FastAPI application of an env's sessions."""
    fastapi = import_extra("fastapi", "serve")
    responses = import_extra("fastapi.responses", "serve")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        reaper = asyncio.create_task(_close_idle_for_ever(server))
        yield
        reaper.cancel()
        await server.close_all()

    app = fastapi.FastAPI(title=f"vlmrl env {server.spec.name}", lifespan=lifespan)

    async def answered(call: Awaitable[dict[str, Any]]) -> Any:
        try:
            return responses.JSONResponse(await call)
        except RetryTurn as error:
            kind, message = "retry", str(error)
        except EnvContractError as error:
            kind, message = "contract", str(error)
        except Exception as error:
            kind, message = "error", f"{type(error).__name__}: {error}"
        return responses.JSONResponse({"kind": kind, "message": message}, status_code=500)

    async def start(name: str, body: dict[str, Any]) -> Any:
        return await answered(server.start(name, body))

    async def step(name: str, body: dict[str, Any]) -> Any:
        return await answered(server.step(name, body))

    async def finish(name: str, body: dict[str, Any]) -> Any:
        return await answered(server.finish(name, body))

    async def close(name: str) -> Any:
        return await answered(server.close(name))

    async def health() -> dict[str, Any]:
        shown = {"tools": server.spec.tools, "replayable": server.spec.replayable}
        return {"status": "ok", "env": server.spec.name, "sessions": len(server.sessions), **shown}

    for method, path, handler in (
        ("PUT", "/sessions/{name}", start),
        ("POST", "/sessions/{name}/step", step),
        ("POST", "/sessions/{name}/finish", finish),
        ("DELETE", "/sessions/{name}", close),
        ("GET", "/health", health),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _close_idle_for_ever(server: EnvServer) -> None:
    while True:
        await asyncio.sleep(min(10.0, server.idle_timeout))
        await server.close_idle()


def serve(arguments: ServeArguments) -> None:
    """Serve an env over HTTP until interrupted: a run plays it with `env="vlmrl:RemoteEnv", env_options={"url": URL}`."""
    uvicorn = import_extra("uvicorn", "serve")
    spec = resolve_env(arguments.env, options=dict(arguments.env_options))
    server = EnvServer(
        spec, timeout=arguments.timeout, idle_timeout=arguments.idle_timeout, max_sessions=arguments.max_sessions
    )
    print(f"{spec.name} at http://{arguments.host}:{arguments.port}", flush=True)
    uvicorn.run(
        create_app(server), host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=5
    )
