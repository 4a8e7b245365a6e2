"""`vlmrl env serve`: an env as an HTTP server. Each session is one env of one trajectory; `client.py` is the other end.

PUT    /sessions/ID           builds the env of a task and resets it: the first messages, the tools
POST   /sessions/ID/step      one response of the model: messages, done, reward, metrics
POST   /sessions/ID/finish    the final reward
DELETE /sessions/ID           closes the session
GET    /health                the env's name, its tools, the number of sessions

An error has status 500 and the body {"kind": "retry", "contract" or "error", "message": ...}; a request that breaks the protocol has
status 422 and the kind "error". A session answers one request at a time, but for its DELETE, which ends the others. Requests and
responses hold their images' content: what a client names is never opened.

Responses are made in parallel, in the process's threads for CPU work, and may wait there for a while if many sessions step at once. A
response that is not ready after HEARTBEAT_SECONDS begins then, with status 200 and a newline, and has a further newline, which JSON
permits, every HEARTBEAT_SECONDS until its body comes; an error is then recognized by its "kind". So a client's time-out is the time
without any sign of the server, not the time in its queues. What the server does has deadlines of its own, which begin with the work.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple, get_args

import tyro
from aiohttp import web
from aiohttp.typedefs import Handler

from vlmrl.config import Options
from vlmrl.env.base import EnvSpec, RetryTurn, resolve_env
from vlmrl.env.remote.client import TOKEN_VARIABLE
from vlmrl.env.remote.serialize import MAX_TEXT, decoded_bytes, deserialize_task, serialize_messages
from vlmrl.env.session import EnvContractError, EnvSession
from vlmrl.multimodal.embedded import Refuse, fetch_embedded, refusing_sources_of
from vlmrl.multimodal.fetch import is_url
from vlmrl.multimodal.images import content_of
from vlmrl.multimodal.messages import images_of, map_images
from vlmrl.types import Ending, Message, Task
from vlmrl.utils.http_server import BODY, Binding, run_server, send_rest
from vlmrl.utils.json_files import json_body, parsed_bytes
from vlmrl.utils.machine_memory import memory_bytes
from vlmrl.utils.threads import DaemonExecutor
from vlmrl.utils.users_line import describe_error
from vlmrl.utils.work_pool import cpu_pool

HEARTBEAT_SECONDS = 2.0
LONG_BODY = 100_000  # bytes; parsing them takes about a millisecond
_CALLS: set[asyncio.Task[tuple[int, bytes]]] = set()  # they go on if the client leaves: no session is left half-way
ENDINGS: tuple[str, ...] = get_args(Ending)


@dataclass(frozen=True)
class EnvServerArguments:
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """`module:Name` or `file.py:Name`."""
    env_options: Options = field(default_factory=dict)
    """Arguments of the env's constructor or factory."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the loopback address requires a token."""
    port: int = 8100
    token_variable: str = TOKEN_VARIABLE
    """Environment variable with the token that clients must send. Unset: none is required."""
    timeout: float = 45.0
    """Seconds that one call of an env method may take."""
    idle_timeout: float = 1800.0
    """Seconds without a request after which a session is closed. Must exceed the time that the model needs for one response."""
    max_sessions: int = 4096
    """Open sessions; further ones are refused."""
    max_body_mib: float = 64.0
    """MiB of a request's body, which holds a task's images; larger ones are refused."""


class RequestError(ValueError):
    """A request that breaks the protocol."""


@dataclass
class _OpenSession:
    """A session, which images its client may not have opened, and the memory of its task in bytes.

    ``last_used`` is the time of its last request, ``call`` the one that is being answered.
    """

    session: EnvSession
    refuse: Refuse
    size: int
    last_used: float = field(default_factory=time.monotonic)
    call: asyncio.Task[bytes] | None = None


class EnvServer:
    """The sessions of one env. In seconds, ``timeout`` limits a call of an env method, ``idle_timeout`` the time between requests."""

    def __init__(
        self, spec: EnvSpec, *, timeout: float = 45.0, idle_timeout: float = 1800.0, max_sessions: int = 4096
    ) -> None:
        self.spec = spec
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.max_sessions = max_sessions
        self.max_bytes = memory_bytes() // 4  # of the tasks of the open sessions, with their images decoded
        self.sessions: dict[str, _OpenSession] = {}
        self._starting: set[str] = set()  # names of sessions whose tasks are being read
        # The sizes of closed sessions, until their env is closed and its thread free.
        self._outlived: dict[Future[Any], int] = {}

    async def start(self, name: str, content: bytes) -> bytes:
        """Build the env of the task in the body of a request, and reset it."""
        if name in self._starting:
            raise RequestError(f"session {name} is being started already.")
        self._starting.add(name)
        try:
            new = await cpu_pool().run(self.timeout, _read_start, content)
            if name not in self._starting:
                raise RuntimeError(f"session {name} was closed before it started.")
        finally:
            self._starting.discard(name)
        session = EnvSession(
            self.spec,
            new.task,
            max_turns=new.max_turns,
            timeout=self.timeout,
            max_retries=0,  # the client retries
            tool_format=new.tool_format,
        )
        self._outlived = {free: size for free, size in self._outlived.items() if not free.done()}
        sizes = [*(opened.size for opened in self.sessions.values()), *self._outlived.values()]
        if name in self.sessions or len(sizes) >= self.max_sessions:
            raise RuntimeError(
                f"session {name} cannot start: it exists already, or there are {self.max_sessions} sessions (--max-sessions), with "
                "closed ones whose call or close goes on."
            )
        if sum(sizes) + new.size > self.max_bytes:
            raise RuntimeError(
                f"session {name} cannot start: the tasks of the open ones have {self.max_bytes} bytes, a quarter of the memory."
            )
        self.sessions[name] = _OpenSession(session, new.refuse, new.size)

        async def call(opened: _OpenSession) -> bytes:
            messages = await session.start()
            rest = {"tools": session.tools, "replayable": session.replayable}
            return await self._response(opened, messages, rest)

        return await self._use(name, call)

    async def step(self, name: str, content: bytes) -> bytes:
        response = _text(await self.parsed(content), "response")

        async def call(opened: _OpenSession) -> bytes:
            result = await opened.session.step(response)
            points = [asdict(each) for each in result.points]
            rest = {"done": result.done, "reward": result.reward, "metrics": result.metrics, "points": points}
            return await self._response(
                opened, result.messages, rest | {"state": result.state, "compact": result.compact}
            )

        return await self._use(name, call)

    async def finish(self, name: str, content: bytes) -> bytes:
        body = await self.parsed(content)
        ending, response = _text(body, "ending"), _text(body, "last_response")
        turn = _field(body, "last_turn", int, optional=True)
        del body  # it may take 75 times its bytes
        if ending not in ENDINGS:
            raise RequestError(f"ending must be one of {', '.join(ENDINGS)}, but it is {reprlib.repr(ending)}.")

        async def call(opened: _OpenSession) -> bytes:
            return _dump({"reward": await opened.session.finish(ending, response, turn)})

        return await self._use(name, call)

    async def close(self, name: str) -> bytes:
        """Close a session, or end its start. One with a running call is abandoned: its env closes when its method returns."""
        self._starting.discard(name)
        opened = self.sessions.pop(name, None)
        if opened is not None and opened.call is not None:
            opened.call.cancel()
            await opened.session.abandon()
            self._count_until_free(opened)
        elif opened is not None:
            await self._close(opened)
        return _dump({})

    async def health(self) -> bytes:
        spec = self.spec
        status = {"status": "ok", "env": spec.name, "sessions": len(self.sessions)}
        return _dump({**status, "tools": spec.tools, "replayable": spec.replayable})

    async def close_idle(self) -> None:
        oldest = time.monotonic() - self.idle_timeout
        idle = [name for name, opened in self.sessions.items() if opened.call is None and opened.last_used < oldest]
        await asyncio.gather(*map(self.close, idle))

    async def close_all(self) -> None:
        await asyncio.gather(*map(self.close, list(self.sessions)))

    async def parsed(self, content: bytes) -> dict[str, Any]:
        """The JSON object in a request's body."""
        is_long = len(content) > LONG_BODY
        return await cpu_pool().run(self.timeout, _parse, content) if is_long else _parse(content)

    async def _response(self, opened: _OpenSession, messages: list[Message] | None, rest: dict[str, Any]) -> bytes:
        """The JSON of a response with the session's messages. Addresses are fetched first, so that a slow one holds no thread."""
        fetched: dict[int, bytes] = {}
        for image in images_of(messages or []):
            if is_url(content_of(image)):
                opened.refuse(image)
                fetched[id(image)] = await fetch_embedded(image)

        def response() -> bytes:
            if messages is None:
                return _dump({"messages": None, **rest})
            for image in images_of(messages):
                opened.refuse(image)
            shown = map_images(messages, lambda image: fetched.get(id(image), image))
            return _dump({"messages": serialize_messages(shown, "messages"), **rest})

        return await cpu_pool().run(self.timeout, response)

    async def _use(self, name: str, call: Callable[[_OpenSession], Coroutine[Any, Any, bytes]]) -> bytes:
        """One call of a session. An error other than RetryTurn closes the session."""
        opened = self.sessions.get(name)
        if opened is None:
            raise RuntimeError(
                f"there is no session {name}: it was closed, it failed, or it was idle for {self.idle_timeout:g} s."
            )
        if opened.call is not None:
            raise RequestError(f"session {name} answers another request: wait for its response.")
        opened.call = asyncio.create_task(call(opened))
        try:
            return await opened.call
        except RetryTurn:
            raise
        except asyncio.CancelledError:
            raise RuntimeError(f"session {name} was closed.") from None
        except Exception:
            self.sessions.pop(name, None)
            await self._close(opened)
            raise
        finally:
            opened.call = None
            opened.last_used = time.monotonic()

    async def _close(self, opened: _OpenSession) -> None:
        """Close a session whose call has ended. It counts until then."""
        closing: Future[None] = Future()
        self._outlived[closing] = opened.size
        try:
            await opened.session.close()
        finally:
            closing.set_result(None)
            self._count_until_free(opened)

    def _count_until_free(self, closed: _OpenSession) -> None:
        """Count a closed session until its thread is free: a call that its client left, or that was too late, goes on."""
        if closed.session.thread_free is not None:
            self._outlived[closed.session.thread_free] = closed.size


def create_env_app(server: EnvServer) -> web.Application:
    """The app of an env's sessions, without a guard."""

    async def sessions(app: web.Application) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())  # an env's calls may hang
        cleaner = asyncio.create_task(_close_idle_sessions(server))
        yield
        cleaner.cancel()
        await server.close_all()

    def with_body(use: Callable[[str, bytes], Coroutine[Any, Any, bytes]]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await _respond(request, use(request.match_info["name"], request[BODY]))

        return handler

    async def close(request: web.Request) -> web.StreamResponse:
        return await _respond(request, server.close(request.match_info["name"]))

    async def health(request: web.Request) -> web.StreamResponse:
        return await _respond(request, server.health())

    app = web.Application()
    app.cleanup_ctx.append(sessions)
    app.router.add_put("/sessions/{name}", with_body(server.start))
    app.router.add_post("/sessions/{name}/step", with_body(server.step))
    app.router.add_post("/sessions/{name}/finish", with_body(server.finish))
    app.router.add_delete("/sessions/{name}", close)
    app.router.add_get("/health", health)
    return app


async def _respond(request: web.Request, call: Coroutine[Any, Any, bytes]) -> web.StreamResponse:
    """The response of ``call``, after newlines that show that the server is at work.

    If the client leaves, the call goes on, and its body counts among those that are being answered until then.
    """
    outcome = asyncio.create_task(_outcome(call))
    _CALLS.add(outcome)
    outcome.add_done_callback(_CALLS.discard)
    try:
        await asyncio.wait([outcome], timeout=HEARTBEAT_SECONDS)
        if outcome.done():
            status, content = outcome.result()
            return web.Response(status=status, body=content, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while not outcome.done():
            await response.write(b"\n")
            await asyncio.wait([outcome], timeout=HEARTBEAT_SECONDS)
    except (asyncio.CancelledError, ConnectionError):
        await asyncio.wait([outcome])
        raise
    return await send_rest(request, response, outcome.result()[1])


async def _outcome(call: Coroutine[Any, Any, bytes]) -> tuple[int, bytes]:
    """Status and body of the response."""
    status, kind = 500, "error"
    try:
        return 200, await call
    except RetryTurn as error:
        kind, message = "retry", str(error)
    except EnvContractError as error:
        kind, message = "contract", str(error)
    except RequestError as error:
        status, message = 422, str(error)
    except Exception as error:
        message = describe_error(error)
    return status, _dump({"kind": kind, "message": message})


async def _close_idle_sessions(server: EnvServer) -> None:
    while True:
        await asyncio.sleep(min(10.0, server.idle_timeout))
        await server.close_idle()


def serve_env(arguments: EnvServerArguments) -> None:
    """Serve an env over HTTP until interrupted. A run uses it with `env="vlmrl:RemoteEnv", env_options={"url": URL}`."""
    binding = Binding.from_options(arguments.host, arguments.port, arguments.token_variable, arguments.max_body_mib)
    spec = resolve_env(arguments.env, options=dict(arguments.env_options))
    server = EnvServer(
        spec, timeout=arguments.timeout, idle_timeout=arguments.idle_timeout, max_sessions=arguments.max_sessions
    )
    app = create_env_app(server)
    run_server(app, binding, spec.name)


class _Start(NamedTuple):
    """What a request starts: a task, which images its env may not show, and the memory that the task takes."""

    task: Task
    refuse: Refuse
    max_turns: int
    tool_format: str
    size: int


def _read_start(content: bytes) -> _Start:
    """The start of a session, in one call: a parsed body, which may take 75 times its bytes, waits nowhere."""
    body = _parse(content)
    max_turns = _field(body, "max_turns", int)
    tool_format = _field(body, "tool_format", str, optional=True) or "json"
    try:
        task = deserialize_task(body.get("task"))
        size = parsed_bytes(content) + decoded_bytes(vars(task))
        return _Start(task, refusing_sources_of(vars(task)), max_turns, tool_format, size)
    except RecursionError:
        raise RequestError("task must not be nested so deeply.") from None
    except ValueError as error:
        raise RequestError(str(error)) from error


def _parse(content: bytes) -> dict[str, Any]:
    try:
        return json_body(content)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()


def _field(body: dict[str, Any], name: str, kind: type, *, optional: bool = False) -> Any:
    """A field of a request's body. Raises RequestError unless it is of the type ``kind``; an ``optional`` one may be ``None``."""
    value = body.get(name)
    if type(value) is not kind and not (optional and value is None):
        raise RequestError(f"{name} must be of type {kind.__name__}, but it is {reprlib.repr(value)[:100]}.")
    return value


def _text(body: dict[str, Any], name: str) -> str:
    """A text of a request's body. Raises RequestError for one that is longer than any response."""
    text: str = _field(body, name, str)
    if len(text) > MAX_TEXT:
        raise RequestError(f"{name} must have at most {MAX_TEXT} characters, but it has {len(text)}.")
    return text
