"""An engine that samples from inference servers of any program.

Requests contain one placeholder id per image, and the images at the model's own size, or only their hashes if the server holds them.
All turns of a trajectory go to one server, which has the KV cache of the earlier turns; when it fails, another server starts
the response again. Each response's token counts, logprobs and policy versions are checked before it is used.

Everything runs in an event loop of its own thread, so that health checks and time limits work while the main loop trains.
"""

from __future__ import annotations

import asyncio
import reprlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from vlmrl.engine.base import EngineError, Request, check_placeholders
from vlmrl.engine.image_files import EncodedImage, ImageFiles
from vlmrl.engine.server import UNREACHED, Server, ServerError, suppress_unreachable
from vlmrl.engine.server_backend import Attempt, Call
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.server_response import BadResponse, StaleWeights, completion_of
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion, MediaItem
from vlmrl.utils.threads import LoopThread
from vlmrl.utils.work_pool import DeadlineError

PAUSE_SECONDS = 120.0
ABORT_SECONDS = 10.0


class AdapterExchanged(Exception):
    """The request named a LoRA adapter that a newer one has replaced on the servers since."""


class ServerEngine:
    """Samples from ``servers``. ``banned_ids`` are never sampled, nor is any id from ``vocabulary`` on; with ``routing``, completions
    contain the experts of their tokens.

    With colocated servers, a pause also puts them to sleep. Before they wake, ``offload_trainer`` moves the trainer to host memory;
    it returns False if it cannot, and the servers stay paused. With ``releases_weights``, sleeping servers give up the memory of their
    weights, too, and take it back for the update within the pause; without one they get the last weights again.
    """

    def __init__(
        self,
        servers: ServerPool,
        renderer: Renderer,
        banned_ids: Sequence[int],
        routing: ExpertRouters | None = None,
        offload_trainer: Callable[[], bool] = lambda: True,
        releases_weights: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        self.servers = servers
        self.backend = servers.backend
        self.policy_version = 0
        self.versions: dict[str, int] = {}
        """Policy version of each set of weights that was sent, by its name on the servers."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that new requests are sampled with."""
        self.retried = 0
        """Number of failed attempts."""
        self.resent = 0
        """Number of requests that were sent again with all images, since the server had dropped one that was only named."""
        self.thread = LoopThread("servers")
        self._renderer = renderer
        self._banned_ids = banned_ids
        self._vocabulary = vocabulary
        self._routing = routing
        self._offload_trainer = offload_trainer
        self._releases_weights = releases_weights
        self._server_of: dict[str, Server] = {}  # by trajectory
        self._images = ImageFiles(servers.read_files)
        self._aborts: set[asyncio.Task[Any]] = set()
        self._requests: set[asyncio.Task[Any]] = set()

    @property
    def images_encoded(self) -> int:
        """How many times an image was encoded."""
        return self._images.encoded

    @property
    def seconds(self) -> dict[str, float]:
        """A server does not say how long its prefills and decode steps took."""
        return {}

    async def start(self) -> None:
        """Start the servers and wait for them. Raises EngineError if one does not start, ValueError if one is too old.

        A colocated trainer is offloaded before: a server sizes its KV cache by the memory that is free at its start.
        """
        await self._offload()
        await self.thread.run(self.servers.start())

    async def serve(self) -> None:
        """All servers have the current weights: let them serve, and watch them from now on.

        Raises EngineError if the trainer has failed and keeps the memory of colocated servers.
        """
        await self._offload()
        await self.thread.run(self.servers.serve_all())

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Before :meth:`serve`: within the context servers are paused, so that they take new weights. Colocated ones are asleep, so
        that the trainer may use their GPUs.

        Raises EngineError if a server does not answer. After an error within the context colocated servers stay asleep.
        """
        # A server that is not paused may still count a request that it has answered, and refuse new weights for its sake.
        if not self.servers.colocated:
            try:
                await self.thread.run(self._require_all(self.backend.pause))
                yield
            finally:
                await self.thread.run(self._call_all(self.backend.resume, self.servers.all))
            return
        await self.thread.run(self._require_all(self.backend.pause))
        await self.thread.run(self._require_all(self.backend.sleep, asleep=True))
        yield
        await self._offload()
        await self.thread.run(self._require_all(self.backend.wake, asleep=False))
        await self.thread.run(self._require_all(self.backend.resume))

    async def _offload(self) -> None:
        """Offload a colocated trainer. Raises EngineError if it has failed."""
        if self.servers.colocated and not await asyncio.to_thread(self._offload_trainer):
            raise EngineError(
                f"the {self.backend.title} servers cannot serve: the trainer has failed, and still has its memory on their GPUs"
            )

    async def generate(self, request: Request) -> Completion:
        check_placeholders(request, self._renderer.image_token_id)
        if refusal := self.backend.capabilities.refusal(request.sampling):
            raise ValueError(f"with engine {self.backend.name}, {refusal}.")
        if self.servers.closed:
            raise EngineError(f"trajectory {request.trajectory_id}: the engine was closed")
        return await self.thread.run(self._generate(request))

    async def prepare(self, request: Request) -> None:
        """Encode the images that the request's server is not known to hold."""
        if not self.servers.closed:
            await self.thread.run(self._prepare(request))

    async def generate_on(self, server: Server, request: Request) -> Completion:
        """One attempt on ``server``, whether it serves or not."""
        return await self.thread.run(self._generate_on(server, request))

    def release(self, trajectory_id: str) -> None:
        self._server_of.pop(trajectory_id, None)

    async def pause(self) -> None:
        """Servers put their requests in flight back into the queue; new requests wait here."""
        await self.thread.run(self._pause())

    async def resume(self) -> None:
        """Servers compute the requests in their queue again, with their current weights, and continue them."""
        await self.thread.run(self._resume())

    def weights_changed(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def close(self) -> None:
        """End the servers that the run started. Requests that wait or are in flight raise EngineError."""
        if self.servers.closed:
            return
        self.thread.wait(self._close())
        self.thread.close()
        self._images.close()

    async def _close(self) -> None:
        await self.servers.close()
        if self._requests:
            await asyncio.wait(self._requests, timeout=ABORT_SECONDS)

    async def _generate(self, request: Request) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await self._attempts(request)
        finally:
            self._requests.discard(task)

    async def _attempts(self, request: Request) -> Completion:
        """Attempts until one succeeds: on the trajectory's own server first, on others when it fails."""
        attempts = self.servers.limits.retries + 1
        failure: Exception | None = None
        failures, name_images = 0, True
        while failures < attempts:
            server, images = await self._pick_server(request, name_images)
            began, oldest = time.monotonic(), self.policy_version
            try:
                return _not_older(await self._attempt(server, request, images), oldest)
            except AdapterExchanged:
                continue  # no failure of the server: it gets the request again, for the new adapter
            except (*UNREACHED, ServerError, BadResponse) as error:
                if isinstance(error, ServerError) and error.status == 400:
                    if all(image.json is not None for image in images):
                        raise EngineError(f"trajectory {request.trajectory_id}: {error}") from error
                    name_images = False  # the server has dropped one since
                    self.resent += 1
                    server.images.difference_update(request.media)
                    continue
                failure = error
                failures += 1
                if isinstance(error, StaleWeights):
                    await self.servers.drain(server)
                self._server_of.pop(request.trajectory_id, None)
                server.failed(began)
                self.retried += 1
        raise EngineError(
            f"trajectory {request.trajectory_id}: no {self.backend.title} server answered in {attempts} attempts: "
            f"{type(failure).__name__}: {failure}"
        ) from failure

    async def _generate_on(self, server: Server, request: Request) -> Completion:
        encoded = await self._encode(request, request.media)
        return await self._attempt(server, request, [encoded[item] for item in request.media])

    async def _prepare(self, request: Request) -> None:
        server = self._server_of.get(request.trajectory_id)
        await self._encode(request, [item for item in request.media if server is None or item not in server.images])

    async def _pick_server(self, request: Request, name_images: bool) -> tuple[Server, list[EncodedImage]]:
        """A server, and the request's images for it. With ``name_images``, those that it holds are only named.

        Images are encoded before the server is picked for good: in the meantime it may fail, or an update may come.
        """
        encoded: dict[MediaItem, EncodedImage] = {}
        while True:
            last = self._server_of.get(request.trajectory_id)
            server = await self.servers.pick(last, self.servers.settings.start_timeout)
            held = server.images if name_images else ()
            lacking = [item for item in request.media if item not in encoded and item not in held]
            if not lacking:
                break
            encoded |= await self._encode(request, lacking)
        self._server_of[request.trajectory_id] = server
        named = {item: EncodedImage(None, self._images.sha256(item)) for item in request.media if item in held}
        return server, [(encoded | named)[item] for item in request.media]

    async def _encode(self, request: Request, items: Sequence[MediaItem]) -> dict[MediaItem, EncodedImage]:
        try:
            return {item: await self._images.encode(item) for item in items}
        except (OSError, DeadlineError) as error:
            raise EngineError(f"trajectory {request.trajectory_id}: an image could not be read: {error}") from error

    async def _attempt(self, server: Server, request: Request, images: Sequence[EncodedImage]) -> Completion:
        """One attempt on one server. A cancelled attempt is also aborted on the server."""
        attempt = Attempt(
            id=uuid.uuid4().hex,
            request=request,
            images=images,
            adapter=self.adapter,
            stop_ids=self._renderer.stop_ids,
            banned_ids=self._banned_ids,
            expert_routing=self._routing is not None,
            device=server.info.device,
        )
        server.in_flight += 1
        began = time.monotonic()
        try:
            call = self.servers.call(server, *self._call_for(attempt), most_values=attempt.most_values)
            response = await _unless_drained(server, call)
        except asyncio.CancelledError:
            server.given_up(began)
            self._abort(server, attempt.id)
            raise
        except ServerError as error:
            self._check_adapter(attempt.adapter, error)
            raise
        finally:
            server.in_flight -= 1
        completion = self._completion(attempt, response)
        if server.info.holds_images:
            server.images.update(request.media)
        await self.servers.answered(server)
        return completion

    def _call_for(self, attempt: Attempt) -> Call:
        return self.backend.generate(attempt)

    def _check_adapter(self, adapter: str | None, error: ServerError) -> None:
        """Raise what a refused request means if ``error`` names its adapter: the server has unloaded it, or never had it."""
        if adapter is None or not 400 <= error.status < 500 or adapter not in str(error):
            return
        if adapter != self.adapter:
            raise AdapterExchanged from error
        raise StaleWeights(f"the server lacks the current adapter: {error}") from error

    def _completion(self, attempt: Attempt, response: Any) -> Completion:
        """The checked response. Raises BadResponse if another attempt may succeed, ValueError if none can."""
        try:
            return self._parsed(attempt, response)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise BadResponse(f"a response of another form: {what}: {reprlib.repr(response)}") from error

    def _parsed(self, attempt: Attempt, response: Any) -> Completion:
        return completion_of(
            attempt.request,
            self.backend.parse(attempt, response),
            self.versions,
            adapter=attempt.adapter,
            routing=self._routing,
            routing_hint=self.backend.routing_hint,
            banned_ids=self._banned_ids,
            vocabulary=self._vocabulary,
        )

    def _abort(self, server: Server, attempt_id: str) -> None:
        call = self.servers.call(server, *self.backend.abort(attempt_id), timeout=ABORT_SECONDS)
        task = asyncio.create_task(suppress_unreachable(call))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _pause(self) -> None:
        colocated = self.servers.colocated
        if colocated and not self.servers.paused:
            await self.servers.wait_for_starts()
        self.servers.paused = True
        await self._call_all(self.backend.pause, self.servers.ready)
        if colocated:
            awake = [server for server in self.servers.ready if not server.asleep]
            await self._call_all(self.backend.sleep, awake, asleep=True)
            if self._releases_weights and self.backend.release_weights is not None:
                awake = [server for server in awake if server.ready]
                await self._call_all(self.backend.release_weights, awake)
                for server in awake:
                    server.without_weights = server.ready
            await self.servers.stop_awake()

    async def _resume(self) -> None:
        if self.servers.colocated:
            if not await asyncio.to_thread(self._offload_trainer):
                return
            await self._resend_weights()
            asleep = [server for server in self.servers.ready if server.asleep]
            await self._call_all(self.backend.wake, asleep, asleep=False)
        await self._call_all(self.backend.resume, self.servers.ready)
        self.servers.paused = False
        for server in self.servers.all:
            if not server.ready:
                server.check_health.set()  # health checks stop during a pause
        await self.servers.notify()

    async def restore_weights(self, servers: Sequence[Server]) -> None:
        """Before an update, on this engine's thread: servers that have released the memory of their weights take it back."""
        released = [server for server in servers if server.without_weights]
        if released and self.backend.restore_weights is not None:
            await self._call_all(self.backend.restore_weights, released)
            for server in released:
                server.without_weights = False

    async def _resend_weights(self) -> None:
        """Send servers without weights the last ones: the pause has ended without an update."""
        for server in [server for server in self.servers.ready if server.without_weights]:
            began = time.monotonic()
            try:
                async with self.servers.update_lock:
                    await self.servers.resync(server)
            except EngineError:
                await self.servers.drain(server)
                server.failed(began)

    async def _call_all(self, call: Call, servers: Sequence[Server], asleep: bool | None = None) -> None:
        """Call all ``servers`` and note whether they are ``asleep`` afterwards. One that fails is drained until it is revived."""

        async def call_one(server: Server) -> None:
            began = time.monotonic()
            try:
                await self.servers.call(server, *call, timeout=PAUSE_SECONDS)
                if asleep is not None:
                    server.asleep = asleep
            except (*UNREACHED, ServerError):
                await self.servers.drain(server)
                server.failed(began)

        await asyncio.gather(*(call_one(server) for server in servers))

    async def _require_all(self, call: Call, asleep: bool | None = None) -> None:
        """Call all servers, which do not serve yet. Raises EngineError if one fails."""
        for server in self.servers.all:
            try:
                await self.servers.call(server, *call, timeout=PAUSE_SECONDS)
            except (*UNREACHED, ServerError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise EngineError(
                    f"the server {server.url} failed at {call.path}: {reason}{server.log_tail()}"
                ) from error
            if asleep is not None:
                server.asleep = asleep


def _not_older(response: Completion, oldest: int) -> Completion:
    """Raises StaleWeights for a token of an earlier version than ``oldest``: an update never reached the server that sampled it.

    The startup parity check sends weights of an earlier version, and does not come here. Scores of a teacher have no versions.
    """
    if isinstance(response, Completion) and min(response.policy_versions, default=oldest) < oldest:
        raise StaleWeights(f"it was sampled from weights of version {min(response.policy_versions)}, not of {oldest}")
    return response


async def _unless_drained(server: Server, call: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``call``. Raises ServerError as soon as ``server`` is drained."""
    response, drained = asyncio.ensure_future(call), asyncio.ensure_future(server.drained.wait())
    try:
        await asyncio.wait({response, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not response.done():
            raise ServerError("the server was taken out of service", status=503)
        return response.result()
    finally:
        for task in (response, drained):
            task.cancel()
