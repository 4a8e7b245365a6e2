"""The application that agents call. Each trajectory has an address and a key of its own.

    POST /t/ID/v1/chat/completions         OpenAI's API, also as a stream
    POST /t/ID/v1/responses                OpenAI's Responses API, also as a stream
    POST /t/ID/v1/messages                 Anthropic's API, also as a stream
    POST /t/ID/v1/messages/count_tokens
    GET  /t/ID/v1/models
    POST /t/ID/reward                      {"reward": 0.5} adds to the trajectory's reward
    GET  /health

An error has the form of the API that was called. All of it runs in the server's own event loop: the run's loop only samples. Long
bodies are parsed in the process's threads for CPU work.

A stream begins when its response is sampled, or HEARTBEAT_SECONDS after its request was read; then it has a heartbeat every
HEARTBEAT_SECONDS until the response is sampled.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from aiohttp import web

from vlmrl.config.gateway import Gateway
from vlmrl.gateway.agent_client import MODEL
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.http_exchange import ClientLeftError, Exchange
from vlmrl.gateway.request_body import MAX_KEY_LENGTH, ParsedRequest, check_beside, read_json, refuse
from vlmrl.gateway.request_images import RequestImages, new_bytes
from vlmrl.multimodal.messages import bytes_of
from vlmrl.utils.http_server import BODY_SECONDS, BodyError, drop_rest, names_this_machine, read_body
from vlmrl.utils.require import MOST_NUMBER
from vlmrl.utils.terminal import printable_log
from vlmrl.utils.tokens import is_loopback
from vlmrl.utils.users_line import clear_frames
from vlmrl.utils.work_pool import DeadlineError, cpu_pool

T = TypeVar("T")
HEARTBEAT_SECONDS = 10.0
WRITE_SECONDS = 60.0  # in which a client must read what was written
ROOM_SECONDS = 60.0  # that a request waits for memory for its body
ROOM_POLL_SECONDS = 0.1
LONG_BODY = 100_000  # bytes; parsing them takes about a millisecond
PARSE_SECONDS = 60.0  # in which a thread must parse a body
MAX_IN_FLIGHT = 64  # requests of one trajectory
MAX_WAITING = 192  # further ones of it, each with an open connection, which wait for those
MAX_BODY = 64 * 2**20  # bytes of one request, images included
MAX_HELD = 2**30  # bytes of all bodies, and of what was parsed of them, until they are rendered
KEPT_IDS = 100_000  # of closed trajectories, whose requests are answered with 410 in place of 404
ROUTES = (
    "POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, POST /v1/messages/count_tokens, GET /v1/models "
    "and POST /reward"
)
IN_FLIGHT = {"POST /chat/completions", "POST /responses", "POST /messages", "POST /messages/count_tokens"}
"""The routes whose requests wait for others: they are rendered, and most are sampled."""
log = printable_log(__name__)


@dataclass(eq=False)
class OpenEpisode:
    """An episode whose requests are answered, the loop that it lives on, and the tasks of its requests in the server's loop."""

    episode: AgentEpisode
    loop: asyncio.AbstractEventLoop
    key: bytes = field(repr=False)
    images: RequestImages
    places: asyncio.Semaphore  # for its requests in flight
    held: int = 0  # bytes that count for its requests
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    closed: bool = False


class _Sampling:
    """A response that is sampled in its episode's loop. ``response`` is to be awaited in the server's loop."""

    def __init__(self, opened: OpenEpisode, chat: ChatRequest) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._abandoned = False
        self._sampled: ChatResponse | None = None
        self.response: asyncio.Future[ChatResponse] = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._sample(chat), opened.loop)
        )
        self.response.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody is left

    async def _sample(self, chat: ChatRequest) -> ChatResponse:
        response = await self._opened.episode.complete(chat)
        with self._lock:
            self._sampled, abandoned = response, self._abandoned
        if abandoned:
            self._opened.episode.undelivered(response)
        return response

    def abandon(self) -> None:
        """Cancel the sampling. A response that is already sampled is left out of the trajectory."""
        with self._lock:
            self._abandoned, response = True, self._sampled
        if response is None:
            self.response.cancel()
        else:
            with suppress(RuntimeError):  # the run's loop has ended
                self._opened.loop.call_soon_threadsafe(self._opened.episode.undelivered, response)


class GatewayApp:
    """Answers the requests of the episodes in ``opened``, by their ids. ``counts`` has what happened to requests, by name."""

    def __init__(
        self,
        settings: Gateway,
        *,
        max_body: int = MAX_BODY,
        heartbeat: float = HEARTBEAT_SECONDS,
        body_seconds: float = BODY_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        room_seconds: float = ROOM_SECONDS,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_waiting: int = MAX_WAITING,
        max_held: int = MAX_HELD,
    ) -> None:
        self.opened: dict[str, OpenEpisode] = {}
        self.counts: Counter[str] = Counter()
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._respond)
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._local = settings.public_url is None and is_loopback(settings.host)
        self._heartbeat = heartbeat
        self._body_seconds = body_seconds
        self._write_seconds = write_seconds
        self._room_seconds = room_seconds
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._max_body = max_body
        self._max_held = max(max_held, max_body)
        self._held = 0

    def open_episode(self, name: str, key: str, episode: AgentEpisode, images: RequestImages) -> None:
        """Answer the requests of an episode that lives on the running event loop."""
        places = asyncio.Semaphore(self._max_in_flight)
        self.opened[name] = OpenEpisode(episode, asyncio.get_running_loop(), key.encode(), images, places)

    def close_episode(self, name: str) -> None:
        """End the episode's requests. To be called in the server's loop."""
        opened = self.opened.pop(name, None)
        if opened is None:
            return
        self._closed[name] = None
        while len(self._closed) > KEPT_IDS:
            self._closed.popitem(last=False)
        opened.closed = True
        for task in opened.tasks:
            task.cancel()

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request, self._write_seconds)
        try:
            if self._local and not names_this_machine(request):
                raise ChatError(
                    403, "host", "the endpoint answers to 127.0.0.1 and localhost only: see gateway.public_url."
                )
            if (request.method, request.path) == ("GET", "/health"):
                await exchange.json(200, {"status": "ok", "episodes": len(self.opened)})
            else:
                await self._serve(exchange, *self._find(request))
        except ChatError as error:
            self.counts[_name_of(error)] += 1
            with suppress(ClientLeftError):
                await exchange.error(error, _retry_headers(error))
            clear_frames(error)
        except ClientLeftError:
            self.counts["client_left"] += 1
        await drop_rest(request)
        return exchange.response or web.Response()

    def _find(self, request: web.Request) -> tuple[OpenEpisode, str]:
        """The episode that the request names, if its key is right, and the route: ``POST /chat/completions``."""
        _, first, name, rest = [*request.path.split("/", 3), "", "", ""][:4]
        opened = self.opened.get(name) if first == "t" else None
        if opened is None and name in self._closed:
            raise ChatError(410, "closed", "the trajectory has ended, so that it takes no more requests.")
        if opened is None:
            raise ChatError(404, "unknown", "there is no such trajectory: the URL is http://HOST:PORT/t/ID/v1.")
        if not _has_key(request, opened.key):
            message = "the key is missing or wrong: send the trajectory's own as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            raise ChatError(401, "wrong_key", message)
        path = "/" + rest
        route = f"{request.method} {path.removeprefix('/v1')}"
        is_model = route.startswith("GET /models/")
        if route not in self._handlers and not is_model:
            raise ChatError(404, "no_route", f"{request.method} {path} does not exist; there are {ROUTES}.")
        if len(opened.tasks) >= self._max_in_flight + self._max_waiting:
            limits = f"{self._max_in_flight} requests in flight, and {self._max_waiting} that wait for them"
            message = f"the trajectory has {limits}: wait for one."
            raise ChatError(429, "in_flight", message)
        return opened, "GET /models" if is_model else route

    async def _serve(self, exchange: Exchange, opened: OpenEpisode, route: str) -> None:
        """Answer a request. Ends when the episode is closed."""
        task = asyncio.current_task()
        assert task is not None
        opened.tasks.add(task)
        try:
            # Clients repeat a refused request twice, within seconds, which are less than responses take.
            async with opened.places if route in IN_FLIGHT else nullcontext():
                await self._handlers[route](self, exchange, opened)
        except (ChatError, ClientLeftError):
            raise
        except asyncio.CancelledError:
            if not opened.closed:
                self.counts["client_left"] += 1
                raise
            task.uncancel()
            raise ChatError(410, "closed", "the trajectory has ended.") from None
        except Exception as error:
            log.exception("a request of %s failed", opened.episode.trajectory.id)
            reason = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the run's loop has ended
                opened.loop.call_soon_threadsafe(_fail, opened.episode, reason)
            raise ChatError(500, "failed", reason[:500]) from error
        finally:
            opened.tasks.discard(task)
            self._release(exchange, opened)

    async def _body(self, exchange: Exchange, opened: OpenEpisode) -> bytes:
        """The body of a request. It waits until there is memory for it, and counts until it is released."""
        declared = exchange.request.content_length

        def arrived(size: int) -> None:
            if declared is None:
                self._hold(exchange, opened, exchange.held + size)

        try:
            if declared is not None and declared <= self._max_body:
                await self._wait_for_room(exchange, opened, declared)
            return await read_body(exchange.request, self._max_body, "the gateway's limit", self._body_seconds, arrived)
        except BodyError as error:
            code = {400: "body", 408: "slow_body", 413: "large_body"}[error.status]
            raise ChatError(error.status, code, str(error)) from None

    async def _wait_for_room(self, exchange: Exchange, opened: OpenEpisode, size: int) -> None:
        """Count ``size`` bytes for a request as soon as there is room for them; meanwhile nothing of its body is read.

        Clients repeat a refused request twice, within seconds. Raises ChatError if there is no room in ``room_seconds``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._room_seconds
        while True:
            try:
                return self._hold(exchange, opened, size)
            except ChatError:
                if loop.time() >= deadline:
                    raise
                self._release(exchange, opened)
            await asyncio.sleep(ROOM_POLL_SECONDS)

    def _hold(self, exchange: Exchange, opened: OpenEpisode, size: int) -> None:
        """Count ``size`` bytes of memory for a request. Raises ChatError if there is no room for them.

        One beside others of its trajectory is also refused if the trajectory would hold more than is left free.
        """
        more = size - exchange.held
        self._held += more
        opened.held += more
        exchange.held = size
        left, has_others = self._max_held - self._held, opened.held > size
        if more > 0 and (left < 0 or (has_others and opened.held > left)):
            raise ChatError(
                503,
                "busy",
                f"the requests that arrive now hold too much of the {self._max_held} bytes for all: try again.",
            )

    def _release(self, exchange: Exchange, opened: OpenEpisode) -> None:
        self._hold(exchange, opened, 0)

    async def _complete(self, exchange: Exchange, opened: OpenEpisode) -> None:
        parsed = await self._read(exchange, opened)
        loop = asyncio.get_running_loop()

        def rendered() -> None:  # in the run's loop
            with suppress(RuntimeError):  # the server's has ended
                loop.call_soon_threadsafe(self._release, exchange, opened)

        sampling, delivered = _Sampling(opened, replace(parsed.chat, on_rendered=rendered)), False
        try:
            await self._wait(exchange, parsed, sampling.response)
            response = sampling.response.result()
            await self._deliver(exchange, parsed, opened, response)
            delivered = True
        finally:
            if not delivered:
                sampling.abandon()

    async def _deliver(
        self, exchange: Exchange, parsed: ParsedRequest, opened: OpenEpisode, response: ChatResponse
    ) -> None:
        self.counts["answered"] += 1  # before its client can know
        try:
            if parsed.stream:
                await exchange.events(b"".join(exchange.api.stream(parsed, response)))
                await exchange.end()
            else:
                await exchange.json(200, exchange.api.response(parsed, response))
            opened.tasks.discard(asyncio.current_task())  # all is sent: the end of the episode does not cancel it
            await asyncio.sleep(0)  # a client that has left cancels this task now
        except BaseException:
            self.counts["answered"] -= 1
            raise

    async def _wait(self, exchange: Exchange, parsed: ParsedRequest, response: asyncio.Future[ChatResponse]) -> None:
        """Until there is a response; with heartbeats in a stream."""
        heartbeat = self._heartbeat if parsed.stream else None
        while not (await asyncio.wait([response], timeout=heartbeat))[0]:
            await exchange.events(exchange.api.heartbeat)

    async def _read(self, exchange: Exchange, opened: OpenEpisode) -> ParsedRequest:
        """The request of a body, with its images loaded."""

        def parse(content: bytes) -> tuple[ParsedRequest, int]:
            read = exchange.api.read(read_json(content), opened.images)
            check_beside(read.chat.messages, read.chat.tools)
            return read, bytes_of((read.chat.messages, read.chat.tools))

        parsed, size = await self._parsed(await self._body(exchange, opened), parse)
        # it waits for threads that all episodes share, to load its images and to render it
        self._hold(exchange, opened, size + new_bytes(parsed.chat.messages))
        messages = await opened.images.load(parsed.chat.messages)
        self._hold(exchange, opened, size)
        chat = replace(parsed.chat, messages=messages)
        return replace(parsed, chat=chat, model=parsed.model or MODEL)

    async def _parsed(self, content: bytes, parse: Callable[[bytes], T]) -> T:
        """``parse(content)``; in a thread if it is long, which would stop the event loop."""
        if len(content) <= LONG_BODY:
            return parse(content)
        try:
            return await cpu_pool().run(PARSE_SECONDS, parse, content)
        except DeadlineError as error:
            raise ChatError(503, "late", f"the body was not parsed in {PARSE_SECONDS:g} s.") from error

    async def _count_tokens(self, exchange: Exchange, opened: OpenEpisode) -> None:
        chat = (await self._read(exchange, opened)).chat
        counting = opened.episode.count_tokens(chat)
        count = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(counting, opened.loop))
        await exchange.json(200, {"input_tokens": count})

    async def _models(self, exchange: Exchange, opened: OpenEpisode) -> None:
        """The list of models, or one of them, in OpenAI's and in Anthropic's form at once."""
        openai = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vlmrl"}
        model = openai | {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        is_list = exchange.request.path.endswith("/models")
        await exchange.json(200, {"object": "list", "data": [model], "has_more": False} if is_list else model)

    async def _reward(self, exchange: Exchange, opened: OpenEpisode) -> None:
        body = await self._parsed(await self._body(exchange, opened), read_json)
        self._release(exchange, opened)
        reward, key = body.get("reward"), body.get("id")
        if key is not None and not (isinstance(key, str) and len(key) <= MAX_KEY_LENGTH):
            refuse("id", f"a string of at most {MAX_KEY_LENGTH} characters", key)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or abs(reward) > MOST_NUMBER:
            refuse("reward", f"a number from {-MOST_NUMBER:g} to {MOST_NUMBER:g}", reward)

        episode = opened.episode

        async def post() -> float | None:
            episode.post_reward(float(reward), key)
            return episode.posted_reward

        total = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(post(), opened.loop))
        await exchange.json(200, {"reward": total})

    _handlers: ClassVar[dict[str, Callable[..., Awaitable[None]]]] = {
        "POST /chat/completions": _complete,
        "POST /responses": _complete,
        "POST /messages": _complete,
        "POST /messages/count_tokens": _count_tokens,
        "GET /models": _models,
        "POST /reward": _reward,
    }


def _fail(episode: AgentEpisode, reason: str) -> None:
    """The trajectory must fail: not its agent, but the endpoint had an error."""
    episode.failure = episode.failure or reason


def _has_key(request: web.Request, key: bytes) -> bool:
    """Compares in constant time."""
    bearers = [value.partition(" ")[2] for value in request.headers.getall("authorization", [])]
    given = [*bearers, *request.headers.getall("x-api-key", [])]
    return any(secrets.compare_digest(each.encode(errors="replace"), key) for each in given)


def _retry_headers(error: ChatError) -> dict[str, str]:
    """Whether the client should repeat its request; by themselves, clients repeat what failed with 5xx."""
    if error.code in ("busy", "in_flight"):
        return {"retry-after": "1"}
    return {"x-should-retry": "false"} if error.status >= 500 else {}


def _name_of(error: ChatError) -> str:
    """A name for what is counted. Codes that clients choose, such as the place of a field, have one name in common."""
    return "invalid" if error.status == 400 else error.code
