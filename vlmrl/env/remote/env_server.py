"""`vlmrl env serve`: an env as an HTTP server. Each session is one env of one trajectory; `client.py` is the other end.

PUT    /sessions/ID           builds the env of a task and resets it: the first messages, the tools
POST   /sessions/ID/step      one reply of the model: messages, done, reward, metrics
POST   /sessions/ID/finish    the final reward
DELETE /sessions/ID           closes the session
GET    /health                the env's name, its tools, the number of sessions

An error has status 500 and the body {"kind": "retry", "contract" or "error", "message": ...}.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from vlmrl.config import Options
from vlmrl.config.code import import_extra
from vlmrl.env.base import EnvSpec, RetryTurn, resolve_env
from vlmrl.env.remote.serialize import deserialize_task, serialize
from vlmrl.env.session import EnvContractError, EnvSession


@dataclass(frozen=True)
class EnvServerArguments:
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """`module:Name` or `file.py:Name`."""
    env_options: Options = field(default_factory=dict)
    """Arguments of the env's constructor or factory."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication: anybody who reaches it may start sessions."""
    port: int = 8100
    timeout: float = 45.0
    """Seconds that one call of an env method may take."""
    idle_timeout: float = 1800.0
    """Seconds without a request after which a session is closed. Must exceed the time that the model needs for one reply."""
    max_sessions: int = 4096
    """Open sessions; further ones are refused."""


@dataclass
class _OpenSession:
    """A session, the time of its last request, and the number of requests that are running."""

    session: EnvSession
    last_used: float = field(default_factory=time.monotonic)
    running: int = 0


class EnvServer:
    """The sessions of one env. In seconds, ``timeout`` limits a call of an env method, ``idle_timeout`` the time between requests."""

    def __init__(
        self, spec: EnvSpec, *, timeout: float = 45.0, idle_timeout: float = 1800.0, max_sessions: int = 4096
    ) -> None:
        self.spec = spec
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.max_sessions = max_sessions
        self.sessions: dict[str, _OpenSession] = {}

    async def start(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name in self.sessions or len(self.sessions) >= self.max_sessions:
            raise RuntimeError(
                f"session {name} cannot start: it exists already, or there are {self.max_sessions} sessions (--max-sessions)."
            )
        session = EnvSession(
            self.spec,
            deserialize_task(body["task"]),
            max_turns=body["max_turns"],
            timeout=self.timeout,
            max_retries=0,  # the client retries
            tool_format=body["tool_format"] or "json",
        )
        self.sessions[name] = _OpenSession(session)
        messages = await self._use(name, lambda session: session.start())
        return {
            "messages": serialize(messages, "messages"),
            "tools": session.tools,
            "replayable": session.replayable,
        }

    async def step(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        result = await self._use(name, lambda session: session.step(body["reply"]))
        return {
            "messages": serialize(result.messages, "messages"),
            "done": result.done,
            "reward": result.reward,
            "metrics": result.metrics,
        }

    async def finish(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        ending, reply, turn = body["ending"], body["last_reply"], body["last_turn"]
        return {"reward": await self._use(name, lambda session: session.finish(ending, reply, turn))}

    async def close(self, name: str) -> dict[str, Any]:
        """Close a session. One with a running call is abandoned: it closes when the call ends."""
        opened = self.sessions.pop(name, None)
        if opened is not None:
            await (opened.session.abandon() if opened.running else opened.session.close())
        return {}

    async def close_idle(self) -> None:
        oldest = time.monotonic() - self.idle_timeout
        idle = [name for name, opened in self.sessions.items() if not opened.running and opened.last_used < oldest]
        await asyncio.gather(*map(self.close, idle))

    async def close_all(self) -> None:
        await asyncio.gather(*map(self.close, list(self.sessions)))

    async def _use(self, name: str, call: Callable[[EnvSession], Awaitable[Any]]) -> Any:
        """One call of a session. An error other than RetryTurn closes the session."""
        opened = self.sessions.get(name)
        if opened is None:
            raise RuntimeError(
                f"there is no session {name}: it was closed, it failed, or it was idle for {self.idle_timeout:g} s."
            )
        opened.running += 1
        try:
            return await call(opened.session)
        except RetryTurn:
            raise
        except Exception:
            self.sessions.pop(name, None)
            await opened.session.close()
            raise
        finally:
            opened.running -= 1
            opened.last_used = time.monotonic()


def create_env_app(server: EnvServer) -> Any:
    """The FastAPI application of an env's sessions."""
    fastapi = import_extra("fastapi", "serve")
    responses = import_extra("fastapi.responses", "serve")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        cleaner = asyncio.create_task(_close_idle_sessions(server))
        yield
        cleaner.cancel()
        await server.close_all()

    app = fastapi.FastAPI(title=f"vlmrl env {server.spec.name}", lifespan=lifespan)

    async def respond(call: Awaitable[dict[str, Any]]) -> Any:
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
        return await respond(server.start(name, body))

    async def step(name: str, body: dict[str, Any]) -> Any:
        return await respond(server.step(name, body))

    async def finish(name: str, body: dict[str, Any]) -> Any:
        return await respond(server.finish(name, body))

    async def close(name: str) -> Any:
        return await respond(server.close(name))

    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "env": server.spec.name,
            "sessions": len(server.sessions),
            "tools": server.spec.tools,
            "replayable": server.spec.replayable,
        }

    for method, path, handler in (
        ("PUT", "/sessions/{name}", start),
        ("POST", "/sessions/{name}/step", step),
        ("POST", "/sessions/{name}/finish", finish),
        ("DELETE", "/sessions/{name}", close),
        ("GET", "/health", health),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _close_idle_sessions(server: EnvServer) -> None:
    while True:
        await asyncio.sleep(min(10.0, server.idle_timeout))
        await server.close_idle()


def serve_env(arguments: EnvServerArguments) -> None:
    """Serve an env over HTTP until interrupted. A run uses it with `env="vlmrl:RemoteEnv", env_options={"url": URL}`."""
    uvicorn = import_extra("uvicorn", "serve")
    spec = resolve_env(arguments.env, options=dict(arguments.env_options))
    server = EnvServer(
        spec, timeout=arguments.timeout, idle_timeout=arguments.idle_timeout, max_sessions=arguments.max_sessions
    )
    print(f"{spec.name} at http://{arguments.host}:{arguments.port}", flush=True)
    uvicorn.run(
        create_env_app(server),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )
