"""The engine actors as one engine, for the driver, and the weights on their way to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError

from vlmrl.cluster import ClusterError
from vlmrl.cluster.calls import BUCKET, MOVING, Actor, Ref, results
from vlmrl.cluster.payload import SamplePayload, buckets
from vlmrl.cluster.ray_cluster import RayCluster
from vlmrl.config import Config
from vlmrl.engine.base import EngineError, Request
from vlmrl.types import Completion


class RemoteEngine:
    """The engine actors as one engine. A trajectory stays with the one that it began with."""

    def __init__(self, cluster: RayCluster, config: Config) -> None:
        self.policy_version = 0
        self.receive = ToEngines(tuple(cluster.engines), cluster.dtype)
        self._cluster = cluster
        self._takes_turns = config.colocated
        self._timeout = config.rollout.engine_timeout
        self._home: dict[str, int] = {}
        self._encoded = [0] * len(cluster.engines)

    @property
    def images_encoded(self) -> int:
        return sum(self._encoded)

    async def generate(self, request: Request) -> Completion:
        return (await self.generate_batch([request]))[0]

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """All requests, as one batch on each engine."""
        homes = [self._home_of(request.trajectory_id) for request in requests]
        shares = {home: [request for request, at in zip(requests, homes, strict=True) if at == home] for home in homes}
        answers = await asyncio.gather(*(self._ask(home, share) for home, share in shares.items()))
        completions = dict(zip(shares, map(iter, answers), strict=True))
        return [next(completions[home]) for home in homes]

    def release(self, trajectory_id: str) -> None:
        home = self._home.pop(trajectory_id, None)
        if home is not None:
            self._cluster.engines[home].release.remote(trajectory_id)

    async def pause(self) -> None:
        await self._all("pause", self._takes_turns)

    async def resume(self) -> None:
        if not self._takes_turns or await asyncio.to_thread(self._cluster.offload_trainer):
            await self._all("resume")

    def weights_changed(self, policy_version: int) -> None:
        calls = [engine.weights_changed.remote(policy_version) for engine in self._cluster.engines]
        results(calls, MOVING, "note new weights")
        self.policy_version = policy_version

    def close(self) -> None:
        """End the whole cluster: without an engine there is nothing to train on."""
        self._cluster.close()

    def _home_of(self, trajectory_id: str) -> int:
        if trajectory_id not in self._home:
            living = Counter(self._home.values())
            self._home[trajectory_id] = min(range(len(self._encoded)), key=lambda number: living[number])
        return self._home[trajectory_id]

    async def _ask(self, home: int, requests: Sequence[Request]) -> list[Completion]:
        crate, images = SamplePayload.of(requests)
        reply = self._cluster.engines[home].generate.remote(crate, *self._cluster.images.refs(images))
        try:
            async with asyncio.timeout(self._timeout):
                completions, self._encoded[home] = await reply
        except TimeoutError:
            ray.cancel(reply)
            raise EngineError(f"engine {home}: no reply in rollout.engine_timeout ({self._timeout:g} s).") from None
        except asyncio.CancelledError:
            ray.cancel(reply)
            raise
        except ActorDiedError as error:
            raise ClusterError(f"engine {home} died: {error}") from error
        return completions

    async def _all(self, method: str, *arguments: Any) -> None:
        calls = [getattr(engine, method).remote(*arguments) for engine in self._cluster.engines]
        try:
            async with asyncio.timeout(MOVING):
                await asyncio.gather(*calls)
        except TimeoutError:
            raise ClusterError(f"the engines did not {method} in {MOVING:g} s.") from None
        except ActorDiedError as error:
            raise ClusterError(f"an engine died when it was to {method}: {error}") from error


@dataclass(frozen=True)
class ToEngines:
    """Takes weights from where it is called, on rank 0, to the engines."""

    engines: tuple[Actor, ...]
    dtype: torch.dtype

    def __call__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        loading: list[Ref] = []
        for bucket in buckets(weights, BUCKET, self.dtype):
            sent = ray.put(bucket)
            results(loading, MOVING, "load weights")  # one bucket is loaded while the next is gathered
            loading = [engine.load_weights.remote(sent) for engine in self.engines]
        results(loading, MOVING, "load weights")
