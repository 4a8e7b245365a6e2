"""A run's processes as Ray's actors, and what stands for them in the driver: a trainer and an engine like any other.

This file alone imports ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vlmrl
from vlmrl.cluster import ClusterError
from vlmrl.cluster.payload import SamplePayload, SerializedImage, buckets
from vlmrl.cluster.workers import EngineWorker, RankWorker, ServerWorker, code_of
from vlmrl.config import Algo, Config, Lora
from vlmrl.config.code import FILE_MODULE
from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.servers import Server
from vlmrl.model.loading import pick_dtype
from vlmrl.train.checkpoint import load_random, save_random
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Receive
from vlmrl.types import Completion, MediaItem, Sample
from vlmrl.weight_sync.transfer import Method, TransferResult, WeightUpdate

PLACING = 300.0  # seconds until there is room for all processes
LOADING = 1800.0  # until each has its model
STEPPING = 4 * 3600.0  # for a call of the trainer; a rank that waits in vain for another gives up much earlier
MOVING = 900.0  # for weights on their way
KEEPING = 60.0  # for a word from who keeps a server's process
LAST_WORDS = 2.0  # after a first error, for the one that caused it
BUCKET = 256 * 2**20  # bytes of weights that travel at once
CONTROL = 64  # calls of an engine beside those for replies

Ref = Any  # of an object in Ray's store
Actor = Any  # the handle of one


class RayCluster:
    """Trainer ranks and engines, placed and loaded. :meth:`close` ends all of them, and Ray where it was started here.

    ``dtype`` is what all of them compute in. With servers of SGLang for engines it is their :class:`~vlmrl.run.serving.ServerHost`.
    """

    def __init__(self, config: Config, base_dir: Path | None, keep_kv: bool) -> None:
        self.images = ImageObjects()
        self.ranks: list[Actor] = []
        self.engines: list[Actor] = []
        self.dtype = pick_dtype(config.model.dtype, torch.device("cuda" if config.cluster.gpus else "cpu"))
        self._config = config
        self._cluster = config.placed
        self._room: Any = None
        self._failed = False
        self._rank_beside: dict[str, int] = {}  # by server's address, the first of the ranks whose GPUs it shares
        self._owns_ray = not ray.is_initialized()
        try:
            if self._owns_ray:
                _connect(config, base_dir)
            self._room = _reserve(config)
            self._start(config, base_dir if config.cluster.address is None else None, keep_kv)
        except BaseException:
            self.close()
            raise

    @property
    def shares_gpus(self) -> bool:
        """Whether the ranks' GPUs have servers, too."""
        return self._config.engine == "sglang" and self._config.colocated

    @property
    def method(self) -> Method:
        return "tensor" if self.shares_gpus else "group"

    def ask(self, method: str, *arguments: Any, seconds: float = STEPPING) -> Any:
        """Have all ranks do the same; rank 0's answer. After an error of any of them nothing more is asked."""
        what = method if method not in ("call", "call_on") else arguments[0]
        return self._ask_each(method, [arguments] * len(self.ranks), seconds, what)[0]

    def ask_about(self, method: str, samples: Sequence[Sample]) -> Any:
        """What the trainer's ``method`` makes of rows: they go to each node once, and their images once for all calls."""
        crate, images = SamplePayload.of(samples)
        return self.ask("call_on", method, ray.put(crate), *self.images.refs(images))

    def free_gpus(self) -> bool:
        """Have the ranks leave the GPUs to the engines; False where they cannot, since one of them failed."""
        if not self._failed:
            self.ask("leave", seconds=MOVING)
        return not self._failed

    def servers(self, args: dict[str, Any]) -> list[Server]:
        """One for each engine that is asked for, each on its machine and its GPUs."""
        sglang, cluster = self._config.sglang, self._cluster
        if sglang.urls:
            return [Server(url) for url in sglang.urls]
        logs = self._config.folder.absolute() / "servers"
        beside = [number * cluster.num_ranks // cluster.num_engines for number in range(cluster.num_engines)]
        for number, first in enumerate(beside):
            shared = self._gpus_of(first, sglang.tp) if self.shares_gpus else []
            own = sglang.tp if cluster.gpus and not shared else 0
            place = self._place(number * cluster.nodes // cluster.num_engines, own)
            kept = sglang, args, logs / f"server-{number}.log", cluster.gpus > 0, shared
            self.engines.append(ray.remote(ServerWorker).options(**place).remote(*kept))
        hosts = ["127.0.0.1"] * len(self.engines)
        if cluster.nodes > 1:
            hosts = _results([keeper.__ray_call__.remote(_address) for keeper in self.engines], LOADING, "start")
        plans = [keeper.plan.remote(host) for keeper, host in zip(self.engines, hosts, strict=True)]
        urls = _results(plans, LOADING, "plan a server")
        if self.shares_gpus:
            self._rank_beside = dict(zip(urls, beside, strict=True))
        return [Server(url, KeptProcess(keeper)) for url, keeper in zip(urls, self.engines, strict=True)]

    def send(self, delivery: WeightUpdate) -> TransferResult:
        """Have all ranks gather the weights, and rank 0 deliver them, which it can do again alone.

        As handles of GPU memory, servers get them from the rank whose GPU they share.
        """
        by_tensor = delivery.method == "tensor"
        delivery = replace(delivery, by_value=by_tensor and (delivery.again or not self.shares_gpus))
        if not delivery.again:
            parts = parts_by_rank(delivery, self._rank_beside if by_tensor else {}, len(self.ranks))
            sent = self._ask_each("deliver", [(part,) for part in parts], STEPPING, "deliver weights")
            return reduce(add, [each for each in sent if each is not None])
        try:
            return _results([self.ranks[0].deliver.remote(delivery)], STEPPING, "deliver weights")[0]
        except (RayError, ClusterError) as error:
            raise EngineError(f"rank 0 could not deliver the weights once more: {error}") from error

    def score(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        """Before there is a trainer, logprobs of the rows' responses."""
        crate, images = SamplePayload.of(samples)
        return self.ask("logprobs", temperature, ray.put(crate), *self.images.refs(images))

    def close(self) -> None:
        for actor in [*self.ranks, *self.engines]:
            ray.kill(actor)
        self.ranks, self.engines = [], []
        if self._room is not None and ray.is_initialized():
            remove_placement_group(self._room)
            self._room = None
        if self._owns_ray:
            ray.shutdown()

    def _start(self, config: Config, base_dir: Path | None, keep_kv: bool) -> None:
        cluster, plain = self._cluster, _for_workers(config)
        count = cluster.num_ranks
        for rank in range(count):
            place = self._place(rank * cluster.nodes // count, gpus=int(cluster.gpus > 0))
            self.ranks.append(ray.remote(RankWorker).options(**place).remote(plain, base_dir, Ranks(rank, count)))
        if config.engine == "embedded":
            self._start_engines(config, base_dir, keep_kv)
        address = _results([self.ranks[0].__ray_call__.remote(_address)], LOADING, "start")[0]
        (port,) = _results([self.ranks[0].host.remote(address)], LOADING, "start")
        ready = [engine.__ray_ready__.remote() for engine in self.engines]
        _results([*[rank.load.remote(address, port) for rank in self.ranks], *ready], LOADING, "load the model")

    def _start_engines(self, config: Config, base_dir: Path | None, keep_kv: bool) -> None:
        cluster, plain, count = self._cluster, _for_workers(config), len(self.ranks)
        sampled = replace(plain, model=replace(plain.model, lora=Lora(), freeze=()))  # gets merged weights
        for number in range(cluster.num_engines):
            beside = number * count // cluster.num_engines
            gpu = self._gpus_of(beside, 1)[0] if config.colocated else None
            own = int(cluster.gpus > 0 and gpu is None)
            place = self._place(number * cluster.nodes // cluster.num_engines, own)
            place["max_concurrency"] = config.rollout.max_concurrent + CONTROL
            self.engines.append(ray.remote(EngineWorker).options(**place).remote(sampled, base_dir, keep_kv, gpu))

    def _ask_each(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float, what: str) -> list[Any]:
        """Have each rank do the same with arguments of its own."""
        if self._failed:
            raise ClusterError("one of the trainer's ranks has failed: it can do nothing more.")
        calls = [getattr(rank, method).remote(*given) for rank, given in zip(self.ranks, arguments, strict=True)]
        try:
            return _results(calls, seconds, what)
        except BaseException:
            self._failed = True
            raise

    def _gpus_of(self, first: int, count: int) -> list[str]:
        """Of so many ranks from this one on, as Ray numbers GPUs on their machine."""
        ranks = self.ranks[first : first + count]
        return _results([rank.__ray_call__.remote(_gpu) for rank in ranks], LOADING, "start")

    def _place(self, node: int, gpus: int) -> dict[str, Any]:
        where = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=node)
        return {"scheduling_strategy": where, "num_cpus": 1, "num_gpus": gpus}


class RemoteTrainers:
    """Makes trainers on the ranks, one after the other."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def start(self, algo: Algo, **settings: Any) -> RemoteTrainer:
        code = code_of(algo)
        for _, _, function in code:
            module = getattr(function, "__module__", None) or ""
            if module.startswith(FILE_MODULE):  # a recipe's: no other process can import it
                ray.cloudpickle.register_pickle_by_value(sys.modules[module])
        self._cluster.ask("start", algo, code, settings)
        return RemoteTrainer(self._cluster)


class RemoteTrainer:
    """The ranks as one :class:`~vlmrl.train.trainer.Trainer`."""

    def __init__(self, cluster: RayCluster) -> None:
        self.steps_done = 0
        self.scored: list[np.ndarray] = []
        self._cluster = cluster

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        metrics = self._cluster.ask_about("step", samples)
        self.steps_done, self.scored = self._cluster.ask("read", "steps_done", "scored")
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self._cluster.ask_about("score", samples)

    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._cluster.ask_about("kl_by_trajectory", samples)

    def send_weights(self, receive: Receive) -> Any:
        return self._cluster.ask("send_weights", receive, seconds=MOVING)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_weights")

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_adapters")

    def save(self, checkpoint: Path) -> None:
        """Each rank writes its part: the folder must be one that all nodes see."""
        self._cluster.ask("call", "save", checkpoint.resolve(), seconds=MOVING)
        save_random(checkpoint, "driver")

    def restore(self, checkpoint: Path) -> None:
        self._cluster.ask("call", "restore", checkpoint.resolve(), seconds=MOVING)
        (self.steps_done,) = self._cluster.ask("read", "steps_done")
        load_random(checkpoint, "driver")

    def close(self) -> None:
        self._cluster.ask("call", "close")

    def _named(self, which: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._cluster.ask("weights", which, seconds=MOVING):
            yield name, weight.tensor()


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
        if not self._takes_turns or await asyncio.to_thread(self._cluster.free_gpus):
            await self._all("resume")

    def weights_changed(self, policy_version: int) -> None:
        calls = [engine.weights_changed.remote(policy_version) for engine in self._cluster.engines]
        _results(calls, MOVING, "note new weights")
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


class KeptProcess:
    """A server's process that an actor keeps, wherever that is; an actor that is lost is a process that does not run."""

    def __init__(self, keeper: Actor) -> None:
        self._keeper = keeper

    @property
    def alive(self) -> bool:
        """Also where the answer takes long: whoever asks has others to look after."""
        answer = self._keeper.alive.remote()
        try:
            return not ray.wait([answer], timeout=1.0)[0] or ray.get(answer)
        except RayError:
            return False

    def start(self) -> None:
        self._ask("start")

    def stop(self, gently: bool = True) -> None:
        with contextlib.suppress(EngineError):
            self._ask("stop", gently)

    def log_tail(self) -> str:
        try:
            return self._ask("log_tail")
        except EngineError as error:
            return f"; {error}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return _results([getattr(self._keeper, method).remote(*arguments)], KEEPING, f"{method} a server")[0]
        except (RayError, ClusterError) as error:
            raise EngineError(f"who keeps the server's process does not answer: {error}") from error


class ImageObjects:
    """Each distinct image in the object store once, for as long as anybody shows it."""

    def __init__(self) -> None:
        self._refs: weakref.WeakKeyDictionary[MediaItem, Ref] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._refs)

    def refs(self, items: Sequence[MediaItem]) -> list[Ref]:
        for item in items:
            if item not in self._refs:
                self._refs[item] = ray.put(SerializedImage.of(item))
        return [self._refs[item] for item in items]


@dataclass(frozen=True)
class ToEngines:
    """Takes weights from where it is called, on rank 0, to the engines."""

    engines: tuple[Actor, ...]
    dtype: torch.dtype

    def __call__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        loading: list[Ref] = []
        for bucket in buckets(weights, BUCKET, self.dtype):
            sent = ray.put(bucket)
            _results(loading, MOVING, "load weights")  # one bucket is loaded while the next is gathered
            loading = [engine.load_weights.remote(sent) for engine in self.engines]
        _results(loading, MOVING, "load weights")


def parts_by_rank(delivery: WeightUpdate, beside: dict[str, int], ranks: int) -> list[WeightUpdate | None]:
    """What each rank has to deliver: to the servers it is ``beside``, and rank 0, which keeps the weights, to those beside none."""
    targets = [tuple(each for each in delivery.targets if beside.get(each.url, 0) == rank) for rank in range(ranks)]
    parts = [replace(delivery, targets=each, keep=rank == 0) for rank, each in enumerate(targets)]
    return [part if part.targets or part.keep else None for part in parts]


def _connect(config: Config, base_dir: Path | None) -> None:
    cluster = config.placed
    if cluster.address is None:
        cpus = max(_processes(config), os.cpu_count() or 1)  # there may be fewer cores
        # `local`: without an address Ray would join any cluster that it finds on this machine.
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
        return
    code: dict[str, Any] = {"py_modules": [str(Path(vlmrl.__file__).parent)]}
    if base_dir is not None:
        code |= {"working_dir": str(base_dir), "excludes": [f"/{Path(config.output_dir).name}/"]}
    ray.init(address=cluster.address, runtime_env=code, logging_level=logging.WARNING)


def _processes(config: Config) -> int:
    """Those that are placed."""
    return config.placed.num_ranks + (0 if config.attached else config.placed.num_engines)


def _reserve(config: Config) -> PlacementGroup:
    """A bundle of resources on each node."""
    cluster = config.placed
    cpus = -(-_processes(config) // cluster.nodes)
    bundle = {"CPU": cpus} | ({"GPU": cluster.gpus // cluster.nodes} if cluster.gpus else {})
    room = placement_group([bundle] * cluster.nodes, strategy="STRICT_SPREAD")
    if not room.wait(PLACING if cluster.address else 30.0):
        remove_placement_group(room)
        raise ClusterError(
            f"no room on {cluster.nodes} nodes with {bundle} each (cluster.gpus {cluster.gpus}, cluster.nodes {cluster.nodes}): Ray "
            f"has {ray.cluster_resources()}, of which {ray.available_resources()} are free."
        )
    return room


def _for_workers(config: Config) -> Config:
    """What the processes need of a config: no code of the recipe's, and no path that another working directory changes."""
    model = replace(config.model, device="auto" if config.cluster.gpus else "cpu")
    return Config(model=model, train=config.train, output_dir=str(Path(config.output_dir).resolve()), seed=config.seed)


def _address(_: Any) -> str:
    return ray.util.get_node_ip_address()


def _gpu(_: Any) -> str:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]


def _results(calls: Sequence[Ref], seconds: float, what: str) -> list[Any]:
    """All results. After a first error the others are not waited for: they may themselves wait for the one that failed."""
    results: dict[Ref, Any] = {}
    errors: list[RayError] = []
    pending, end = list(calls), time.monotonic() + seconds
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not done:
            break
        try:
            results[done[0]] = ray.get(done[0])
        except RayError as error:
            errors.append(error)
            end = time.monotonic() + LAST_WORDS
    died = next((error for error in errors if isinstance(error, ActorDiedError)), None)
    if died is not None:
        raise ClusterError(f"a process died when it was to {what}: {died}") from died
    if errors:
        raise errors[0]
    if pending:
        raise ClusterError(f"{len(pending)} of {len(calls)} processes did not {what} in {seconds:g} s.")
    return [results[call] for call in calls]
