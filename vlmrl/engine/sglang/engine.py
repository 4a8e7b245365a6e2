"""The SGLang adapter: sends requests to one or many servers, and makes what they answer a :class:`Completion`.

Ids go there with one placeholder per image, the images at the model's own size. A trajectory stays with its server, which
keeps the keys and values of its earlier turns; when that one fails, another begins the reply anew. An answer is taken only if
its counts, its logprobs and the weights it was sampled from are what they must be.

All of it runs in an event loop of its own, so that servers are watched, and time-outs kept, also while the main loop trains.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import numpy as np

from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.image_files import ImageFiles
from vlmrl.engine.servers import UNREACHED, Server, ServerError, Servers, quietly
from vlmrl.model.expert_routing import ExpertRouters, routing_from_indices
from vlmrl.multimodal.renderer import Renderer
from vlmrl.types import Completion, ExpertRouting
from vlmrl.utils.threads import LoopThread

OLDEST = (0, 5, 23)  # earlier ones decode ids that come with images and encode them anew
BAN = -1e9  # added to a logit: its token has no probability, and the others' logprobs are those without it
NOT_A_NUMBER = "NaN happened"  # SGLang calls this a stop string that matched
PAUSE_SECONDS = 120.0
KEYS_AND_VALUES = {"tags": ["kv_cache"]}


class _BadAnswer(Exception):
    """An answer that cannot be used; another attempt may give a better one."""


class _StaleWeights(_BadAnswer):
    """It comes from a server that must be brought to the current weights."""


class SGLangEngine:
    """Samples from ``servers``. ``banned_ids`` are never sampled. ``images_encoded`` counts the images made into PNGs.

    ``versions`` tells the policy version of each set of weights that was sent, by the name it has on the servers; ``adapter``, if
    there is one, is the name of the LoRA adapter that new requests are sampled with. ``retried`` counts attempts that failed.
    With ``routing``, the trainer's, a reply tells its tokens' experts. Where ``servers`` take turns with the trainer, they lend it the
    memory of their keys and values while they are paused, and before they go on ``free_gpus`` makes it leave; False: it cannot.
    """

    def __init__(
        self,
        servers: Servers,
        renderer: Renderer,
        banned_ids: list[int],
        routing: ExpertRouters | None = None,
        free_gpus: Callable[[], bool] = lambda: True,
    ) -> None:
        self.servers = servers
        self.policy_version = 0
        self.versions: dict[str, int] = {}
        self.adapter: str | None = None
        self.thread = LoopThread("sglang")
        self._renderer = renderer
        self._routing = routing
        self._free_gpus = free_gpus
        self._ban = {str(index): BAN for index in banned_ids}
        self._homes: dict[str, Server] = {}
        self._images = ImageFiles(servers.see_files)
        self._aborts: set[asyncio.Task[Any]] = set()
        self.retried = 0

    @property
    def images_encoded(self) -> int:
        return self._images.encoded

    async def start(self) -> None:
        """Wait for the servers. Raises EngineError where one does not come up, ValueError where one is too old."""
        await self.thread.run(self.servers.start())
        for server in self.servers.all:
            _check_version(server)

    async def serve(self) -> None:
        """All servers have the current weights: let them serve, and watch them from now on."""
        if self.servers.colocated:
            await asyncio.to_thread(self._free_gpus)
        await self.thread.run(self.servers.serve_all())

    async def generate(self, request: Request) -> Completion:
        marks = request.prompt_ids.count(self._renderer.image_token_id) if self._renderer.image_token_id else 0
        if marks != len(request.media):
            raise ValueError(
                f"trajectory {request.trajectory_id}: the prompt has {marks} image placeholders, but "
                f"{len(request.media)} images came with it."
            )
        return await self.thread.run(self._generate(request))

    async def ask(self, server: Server, request: Request) -> Completion:
        """One server's answer, whether it serves or not."""

        async def answer() -> Completion:
            return self._completion(request, *await self._ask(server, request))

        return await self.thread.run(answer())

    def release(self, trajectory_id: str) -> None:
        self._homes.pop(trajectory_id, None)

    async def pause(self) -> None:
        """Servers put the requests they work on back to wait; new ones wait here."""
        await self.thread.run(self._pause())

    async def resume(self) -> None:
        """Servers compute what they had put back anew, under the weights they have now, and go on."""
        await self.thread.run(self._resume())

    def weights_changed(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def close(self) -> None:
        """End the servers that were started here. Who still waits gets an EngineError."""
        self.thread.wait(self.servers.close())
        self.thread.close()
        self._images.close()

    async def _generate(self, request: Request) -> Completion:
        """Ask until a server answers: the trajectory's own first, others when it fails."""
        failure: Exception | None = None
        for _ in range(self.servers.config.retries + 1):
            server = await self._server_for(request)
            try:
                return self._completion(request, *await self._ask(server, request))
            except (*UNREACHED, ServerError, _BadAnswer) as error:
                if isinstance(error, ServerError) and error.status == 400:
                    raise ValueError(f"trajectory {request.trajectory_id}: {error}") from error
                failure = error
                if isinstance(error, _StaleWeights):
                    await self.servers.withdraw(server)
                self._homes.pop(request.trajectory_id, None)
                server.failed()
                self.retried += 1
        raise EngineError(
            f"trajectory {request.trajectory_id}: no SGLang server answered in {self.servers.config.retries + 1} attempts: "
            f"{type(failure).__name__}: {failure}"
        ) from failure

    async def _server_for(self, request: Request) -> Server:
        home = self._homes.get(request.trajectory_id)
        server = await self.servers.pick(home, self.servers.config.start_timeout)
        self._homes[request.trajectory_id] = server
        return server

    async def _ask(self, server: Server, request: Request) -> tuple[dict[str, Any], str | None]:
        """One attempt: the answer, and the adapter it was sampled with. Given up here, the request is aborted there."""
        rid, adapter = uuid.uuid4().hex, self.adapter
        server.in_flight += 1
        try:
            body = await self._body(request, rid, adapter)
            answer = await _unless(server.gone, self.servers.call(server, "/generate", body))
            server.answered()
            return answer, adapter
        except asyncio.CancelledError:
            self._abort(server, rid)
            raise
        finally:
            server.in_flight -= 1

    async def _body(self, request: Request, rid: str, adapter: str | None) -> bytes:
        fields: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(request.prompt_ids),
            "sampling_params": self._sampling(request.sampling),
            "return_logprob": True,
        }
        if adapter is not None:
            fields["lora_path"] = adapter
        if self._routing is not None:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": request.routing_from}
        body = json.dumps(fields, separators=(",", ":")).encode()
        if not request.media:
            return body
        images = [await self._images.payload(item) for item in request.media]
        return b"".join([body[:-1], b',"image_data":[', b",".join(images), b"]}"])

    def _sampling(self, params: SamplingParams) -> dict[str, Any]:
        return {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop": list(params.stop),
            "stop_token_ids": sorted(self._renderer.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "logit_bias": self._ban,
        }

    def _completion(self, request: Request, answer: dict[str, Any], adapter: str | None) -> Completion:
        """Raises _BadAnswer for what another attempt may mend, ValueError for what none will."""
        meta, ids = answer["meta_info"], list(answer["output_ids"])
        reason = _stop_reason(meta["finish_reason"], self._renderer.stop_ids)
        sampled = [pair[:2] for pair in meta["output_token_logprobs"][: len(ids)]]
        if [token for _, token in sampled] != ids or not all(_is_finite(logprob) for logprob, _ in sampled):
            raise _BadAnswer(f"{len(ids)} ids came with {len(sampled)} logprobs that are not theirs, or not finite")
        expected = len(request.prompt_ids) + sum(item.num_tokens - 1 for item in request.media)
        if meta["prompt_tokens"] != expected:
            raise ValueError(
                f"trajectory {request.trajectory_id}: the SGLang server counted {meta['prompt_tokens']} prompt tokens, but we "
                f"{expected}: they do not expand or resize images alike."
            )
        versions = self._versions(meta, len(ids))
        if adapter is not None:
            versions = [self.versions[adapter]] * len(ids)  # a reply keeps the adapter that it began with
        routes = self._routes(meta, versions, expected - request.routing_from) if reason != "abort" else []
        return Completion(ids, [logprob for logprob, _ in sampled], reason, versions, expected, routes)

    def _versions(self, meta: dict[str, Any], length: int) -> list[int]:
        """Per token, the policy version of the weights it was sampled from."""
        versions: list[int] = []
        for span in meta["weight_versions"]:
            if span["version"] not in self.versions:
                raise _StaleWeights(f"it was sampled from weights {span['version']!r}, which this run never sent")
            versions += [self.versions[span["version"]]] * (span["end"] - span["start"])
        if len(versions) != length:
            raise _BadAnswer(f"{length} ids came with the policy versions of {len(versions)}")
        return versions

    def _routes(self, meta: dict[str, Any], versions: list[int], prompt: int) -> list[ExpertRouting | None]:
        """The experts of the last ``prompt`` tokens of the prompt, and of the reply's, whose last was drawn and not run.

        After an update a server runs all tokens again: those that earlier weights sampled have experts that nobody knows any more.
        """
        if self._routing is None:
            return []
        if meta.get("routed_experts") is None:
            raise ValueError(
                "the SGLang server does not tell the experts of its tokens: start it with --enable-return-routed-experts, or set "
                "train.replay_routing False."
            )
        told = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        layers, top_k = self._routing.layers, self._routing.top_k
        run = prompt + len(versions) - 1
        if len(told) != run * layers * top_k:
            raise ValueError(
                f"the SGLang server told {len(told)} experts of {run} tokens, which is not {top_k} in each of {layers} layers."
            )
        routes = routing_from_indices(told.reshape(-1, layers, top_k))
        current = [True] * prompt + [version == versions[-1] for version in versions[:-1]]
        return [*(route if known else None for route, known in zip(routes, current, strict=True)), None]

    def _abort(self, server: Server, rid: str) -> None:
        task = asyncio.create_task(quietly(self.servers.call(server, "/abort_request", {"rid": rid}, timeout=10)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _pause(self) -> None:
        colocated = self.servers.colocated
        if colocated and not self.servers.paused:
            await self.servers.settle()
        self.servers.paused = True
        await self._tell("/pause_generation", {"mode": "retract"}, self.servers.ready)
        if colocated:
            lenders = [server for server in self.servers.ready if not server.lends]
            await self._tell("/release_memory_occupation", KEYS_AND_VALUES, lenders, lends=True)
            await self.servers.stop_unlent()

    async def _resume(self) -> None:
        if self.servers.colocated:
            if not await asyncio.to_thread(self._free_gpus):
                return
            lenders = [server for server in self.servers.ready if server.lends]
            await self._tell("/resume_memory_occupation", KEYS_AND_VALUES, lenders, lends=False)
        await self._tell("/continue_generation", {}, self.servers.ready)
        self.servers.paused = False
        for server in self.servers.all:
            if not server.ready:
                server.suspected.set()  # it was not looked after meanwhile
        await self.servers.notify()

    async def _tell(
        self, path: str, body: dict[str, Any], servers: Sequence[Server], lends: bool | None = None
    ) -> None:
        """What makes them lend, or no longer; one that does not hear it has to be brought to life before it serves again."""

        async def tell(server: Server) -> None:
            try:
                await self.servers.call(server, path, body, timeout=PAUSE_SECONDS)
                if lends is not None:
                    server.lends = lends
            except (*UNREACHED, ServerError):
                await self.servers.withdraw(server)
                server.failed()

        await asyncio.gather(*(tell(server) for server in servers))


def _stop_reason(finish: dict[str, Any], stop_ids: frozenset[int]) -> Literal["stop", "length", "abort"]:
    kind, matched = finish["type"], finish.get("matched")
    if kind == "abort" and finish.get("status_code"):
        raise _BadAnswer(f"the server gave it up: {finish.get('message')}")
    if matched == NOT_A_NUMBER:
        raise _BadAnswer("the server's logits were not finite")
    if isinstance(matched, int) and matched not in stop_ids:
        raise ValueError(
            f"the SGLang server ended a reply at token {matched}, which is none of ours {sorted(stop_ids)}: its tokenizer or "
            "generation config differs from model.path's."
        )
    assert kind in ("stop", "length", "abort"), finish
    return kind


def _is_finite(logprob: float | None) -> bool:
    return logprob is not None and math.isfinite(logprob)


def _check_version(server: Server) -> None:
    told = str(server.info.get("version", "unknown"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", told)[:3])
    if numbers < OLDEST:
        raise ValueError(
            f"the server {server.url} is SGLang {told}, but {'.'.join(map(str, OLDEST))} or newer is needed: earlier ones encode "
            "ids that come with images anew."
        )


async def _unless(gone: asyncio.Event, call: Coroutine[Any, Any, Any]) -> Any:
    """What ``call`` gives, or ServerError as soon as the server is ``gone``."""
    asked, ended = asyncio.ensure_future(call), asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise ServerError("the server was taken out of service", status=503)
        return asked.result()
    finally:
        for task in (asked, ended):
            task.cancel()
