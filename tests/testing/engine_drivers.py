"""What the conformance suite of engines (`engine/conformance.py`) does with an engine: a driver for each kind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from testing.episodes import a_task, image
from testing.real_servers import left_of
from vlmrl.config import Cluster, Config, Data, Model, Rollout, ServerSettings, Train
from vlmrl.engine.base import Request, SamplingParams, paused
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.server import Server, ServerError
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import Limits, ServerPool
from vlmrl.multimodal.placeholders import expand
from vlmrl.run.build import Run
from vlmrl.train.packing import response_logprobs
from vlmrl.types import Completion, Sample
from vlmrl.weight_sync.base import NamedWeights, TransferResult, WeightUpdate

Weights = dict[str, torch.Tensor]
SECONDS = 900  # limit of everything that waits for an engine
EMBEDDING = "model.language_model.embed_tokens.weight"


class EngineDriver:
    """A run of a tiny Qwen3-VL whose engine serves, with weights that ``use`` sets. Its policy's copy has the trainer's logprobs."""

    tolerance = 1e-3
    """Largest logprob difference of engine and trainer, in nats."""
    promises_seeds = True
    """The same seed gives the same response, whatever else is in the batch."""
    filters = True
    """It samples with top-p and top-k, and reports logprobs of the distribution before them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engine: Any = run.engine
        assert run.store is not None
        self.store = run.store
        self.renderer = run.model.renderer
        self.policy = run.model.policy.frozen_copy()
        self.sharp = sharpened(dict(self.policy.model.named_parameters()))
        self.weights: Weights = {}
        self.largest = 0.0
        """The largest difference that :meth:`check` found."""

    # What may differ

    async def push(self, version: int) -> None:
        """Send the trainer's weights to the engine, which is paused."""

    async def running(self) -> int:
        """Number of requests that the engine works on."""
        raise NotImplementedError

    def fail(self, times: int) -> None:
        """Let the next ``times`` attempts to sample fail inside the engine, with "set by the test" in the error."""
        raise NotImplementedError

    def check_nothing_is_left(self) -> None:
        """After :meth:`close`: no thread and no process of the engine."""
        raise NotImplementedError

    # What all have

    @property
    def version(self) -> int:
        version: int = self.engine.policy_version
        return version

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(work, SECONDS))

    def use(self, weights: Weights) -> None:
        """Replace the weights by an update, unless they are these already."""
        if self.weights is not weights:
            self.wait(self.update(weights))

    async def update(self, weights: Weights) -> None:
        version = self.version + 1
        async with paused(self.engine):
            self.run.model.policy.load_weights(weights.items())
            await self.push(version)
            self.engine.weights_changed(version)
        self.weights = weights

    def speaking(self, ids: Sequence[int]) -> Weights:
        """Weights that sample only the even ones of ``ids``, and little else whatever the prompt: ids 0, 2, ... or ids 1, 3, ..."""
        direction = torch.randn(self.sharp[EMBEDDING].shape[1], generator=torch.Generator().manual_seed(7))
        embedding = self.sharp[EMBEDDING].clone()
        for index, token in enumerate(ids):
            embedding[token] += (2 if index % 2 else -2) * direction / direction.norm()
        return self.sharp | {EMBEDDING: embedding}

    def changed(self, weights: Weights, seed: int, part: str = "") -> Weights:
        """``weights`` with noise in those whose names contain ``part``, more than training would change."""
        generator = torch.Generator().manual_seed(seed)
        noise = {name: 1 + 0.3 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
        return {name: weight * noise[name] if part in name else weight for name, weight in weights.items()}

    def letters(self, text: str = "abcdefghijklmnop") -> list[int]:
        """An id for each letter."""
        ids: list[int] = self.run.model.tokenizer.convert_tokens_to_ids(list(text))
        return ids

    def request(
        self,
        name: str,
        shown: Iterable[str | Image.Image] = (),
        text: str = "What is it?",
        tokens: int = 16,
        **sampling: Any,
    ) -> Request:
        """A first turn about images, or plain ones of 64x64 pixels by their colors."""
        images = [image(each, (64, 64)) if isinstance(each, str) else each for each in shown]
        rendered = self.renderer.prompt(a_task(text, images).prompt)
        media = [self.store.load(each) for each in rendered.images]
        return Request(name, rendered.token_ids, media, SamplingParams(tokens, **sampling))

    def next_turn(self, request: Request, response: Completion, more: Request) -> Request:
        """``request``, its response, and the message of ``more``."""
        ids = [*request.prompt_ids, *response.token_ids, *more.prompt_ids]
        return replace(request, prompt_ids=ids, media=[*request.media, *more.media])

    def ask(self, *requests: Request) -> list[Completion]:
        """The responses to concurrent requests."""
        return self.wait(self.ask_all(requests))  # type: ignore[no-any-return]

    async def ask_all(self, requests: Sequence[Request]) -> list[Completion]:
        return list(await asyncio.gather(*map(self.engine.generate, requests)))

    def scores(self, request: Request, response: Completion, weights: Weights | None = None) -> np.ndarray:
        """The trainer's logprobs of a response, with the current ``weights`` or others."""
        self.policy.load_weights((weights or self.weights).items())
        size = len(response.token_ids)
        prompt = expand(request.prompt_ids, self.policy.image_token_id, request.media)
        tokens = (response.token_ids, [1] * size, response.logprobs, response.policy_versions)
        row = Sample(prompt, *tokens, "g", "t", True, response.stop_reason, list(request.media))
        with torch.no_grad():
            [scores] = response_logprobs(self.policy, [row], request.sampling.temperature or 1.0)
        return scores

    def difference(self, request: Request, response: Completion, weights: Weights | None = None) -> float:
        """The largest difference of the response's logprobs and the trainer's."""
        return float(np.abs(self.scores(request, response, weights) - response.logprobs).max())

    def check(self, requests: Sequence[Request], responses: Sequence[Completion]) -> None:
        """The responses are sampled with the current weights, and have the trainer's logprobs."""
        for request, response in zip(requests, responses, strict=True):
            assert response.token_ids and response.prompt_tokens == prompt_tokens(request)
            assert set(response.policy_versions) == {self.version}, request.trajectory_id
            found = self.difference(request, response)
            self.largest = max(self.largest, found)
            assert found < self.tolerance, request.trajectory_id

    def close(self) -> None:
        self.run.close()


class EmbeddedDriver(EngineDriver):
    """The engine in this process. Its policy is the trainer's."""

    engine: HFEngine

    async def running(self) -> int:
        return len(self.engine._running.rows) + len(self.engine._waiting)

    def fail(self, times: int) -> None:
        policy, hidden, left = self.engine.policy, self.engine.policy.hidden, iter(range(times))

        def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
            if next(left, None) is None:
                policy.hidden = hidden  # type: ignore[method-assign]
                return hidden(*args, **kwargs)
            raise RuntimeError("set by the test")

        policy.hidden = failing  # type: ignore[method-assign]

    def check_nothing_is_left(self) -> None:
        assert not self.engine._thread.is_alive()


class ServerDriver(EngineDriver):
    """Servers that the run has started."""

    engine: ServerEngine
    generate_path = ""
    """Where requests to sample are sent."""
    refuses_wrong_weights = True
    """It answers a weight of a wrong shape with an error. False: it dies."""
    hang_seconds = 10.0
    """Of failed health checks, after which a server counts as dead: more than a healthy one needs."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert run.serving is not None
        self.serving = run.serving
        self.pool = self.engine.servers
        self.pool.limits = self.limits = Limits(health_every=0.5)
        self.groups: list[int] = []  # of processes, when the run was closed

    async def push(self, version: int) -> None:
        await self.serving.sync.push(self.serving.send, version)

    async def push_weights(self, weights: Callable[[], NamedWeights], version: int) -> None:
        """Send these instead of the trainer's."""

        def send(update: WeightUpdate) -> TransferResult:
            return update.send(weights(), self.serving.trainer.rank.sent)

        async with paused(self.engine):
            await self.serving.sync.push(send, version)

    def fail(self, times: int) -> None:
        """As if a server had answered with status 500."""
        call, left = ServerPool.call, iter(range(times))

        async def failing(server: Server, path: str, *args: Any, **options: Any) -> Any:
            if path == self.generate_path and next(left, None) is not None:
                raise ServerError("HTTP 500: set by the test", 500)
            return await call(self.pool, server, path, *args, **options)

        self.pool.call = failing  # type: ignore[method-assign]

    def set(self, **limits: Any) -> None:
        """Change the limits of the servers until the end of the test."""
        self.pool.limits = replace(self.pool.limits, **limits)

    def reset(self) -> None:
        self.pool.limits = self.limits

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the first server."""
        os.killpg(self.process_groups[0], number)

    @property
    def process_groups(self) -> list[int]:
        return [server.process.group for server in self.pool.all]  # type: ignore[union-attr]

    async def until_replaced(self, group: int) -> None:
        """Wait until the first server has another process group than ``group``."""

        def replaced() -> bool:
            with suppress(AssertionError):  # it is being restarted
                return self.process_groups[0] != group
            return False

        await until(replaced)

    def close(self) -> None:
        self.groups = self.process_groups
        super().close()

    def check_nothing_is_left(self) -> None:
        assert self.groups and left_of(self.groups) == []

    async def until_all_serve(self) -> None:
        """Wait until every server is found to be healthy, or has been restarted."""
        for server in self.pool.all:
            server.check_health.set()
            await until(lambda server=server: server.ready and server.alive and not server.unresponsive)  # type: ignore[misc]

    def ask_each_server(self, request: Request) -> list[Completion]:
        return [self.wait(self.engine.generate_on(server, request)) for server in self.pool.all]


class PolicyServerDriver(ServerDriver):
    """The servers of `policy_program.py`."""

    async def running(self) -> int:
        states = [await self.engine.thread.run(self.pool.call(server, "/get_state")) for server in self.pool.all]
        return sum(state["running"] for state in states)

    def fail(self, times: int) -> None:
        """On the first server, which is picked while no server has requests."""
        first = self.pool.all[0]
        self.wait(until(lambda: not first.backoff and not first.unresponsive))
        self.engine.thread.wait(self.pool.call(first, "/fail", {"times": times}))


def policy_config(model: Path, folder: Path) -> Config:
    """Two servers of `policy_program.py`. The startup parity check is left out, so that a fault is found by the suite."""
    settings = ServerSettings(check=False, env={"OMP_NUM_THREADS": "1"})
    engine = f"{Path(__file__).with_name('policy_backend.py')}:PolicyBackend"
    return Config(engine=engine, server=settings, cluster=Cluster(engines=2), **conformance_settings(model, folder))


def embedded_config(model: Path, folder: Path) -> Config:
    return Config(**conformance_settings(model, folder))


def conformance_settings(model: Path, folder: Path) -> dict[str, Any]:
    """Of the run of every engine that the suite is run for."""
    return {
        "name": "conformance",
        "output_dir": str(folder),
        "model": Model(path=str(model), device="cpu", dtype="float32"),
        "data": Data(generator=lambda index, seed: {"prompt": "What?"}, size=4),
        "reward": lambda text, task: 1.0,
        "rollout": Rollout(group_size=2, max_tokens=512, max_response_tokens=8, max_failed_fraction=1.0),
        "train": Train(groups_per_batch=2),
    }


def sharpened(weights: Weights) -> Weights:
    """Random weights that say something: in those that :func:`tiny.build` makes, all tokens are nearly equally likely."""
    factors = {"q_proj": 5.0, "k_proj": 5.0}
    made = {}
    for name, weight in weights.items():
        factor = 1.0
        if "language_model.layers" in name and weight.dim() > 1:
            factor = next((factors[part] for part in factors if part in name), 3.0)
        elif name.endswith("language_model.norm.weight"):
            factor = 8.0
        made[name] = weight.detach() * factor
    return made


def prompt_tokens(request: Request) -> int:
    return len(request.prompt_ids) + sum(item.num_tokens - 1 for item in request.media)


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.02)
