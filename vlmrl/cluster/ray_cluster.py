"""A run's processes as Ray's actors: placed, started and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vlmrl
from vlmrl.cluster import ClusterError
from vlmrl.cluster.calls import CONTROL, KEEPING, LOADING, MOVING, PLACING, STEPPING, Actor, Ref, results
from vlmrl.cluster.payload import SamplePayload, SerializedImage
from vlmrl.cluster.workers import EngineWorker, RankWorker, ServerWorker
from vlmrl.config import Config, Lora
from vlmrl.engine.backend import ServedModel, ServerBackend
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import Server
from vlmrl.model.loading import pick_dtype
from vlmrl.train.ranks import Ranks
from vlmrl.types import MediaItem, Sample
from vlmrl.weight_sync.transfer import Method, TransferResult, WeightUpdate


class RayCluster:
    """Trainer ranks and engines, placed and loaded. :meth:`close` ends all of them, and Ray where it was started here.

    ``dtype`` is what all of them compute in. With servers for engines it is their :class:`~vlmrl.run.serving.ServerHost`.
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
        return self._config.server_settings is not None and self._config.colocated

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

    def offload_trainer(self) -> bool:
        """Have the ranks leave the GPUs to the engines; False where they cannot, since one of them failed."""
        if not self._failed:
            self.ask("leave", seconds=MOVING)
        return not self._failed

    def servers(self, backend: ServerBackend, model: ServedModel) -> list[Server]:
        """One for each engine that is asked for, each on its machine and its GPUs."""
        settings, cluster = backend.settings, self._cluster
        if settings.urls:
            return [Server(url) for url in settings.urls]
        logs = self._config.folder.absolute() / "servers"
        beside = [number * cluster.num_ranks // cluster.num_engines for number in range(cluster.num_engines)]
        for number, first in enumerate(beside):
            shared = self._gpus_of(first, settings.tp) if self.shares_gpus else []
            own = settings.tp if cluster.gpus and not shared else 0
            place = self._place(number * cluster.nodes // cluster.num_engines, own)
            kept = backend, model, logs / f"server-{number}.log", cluster.gpus > 0, shared
            self.engines.append(ray.remote(ServerWorker).options(**place).remote(*kept))
        hosts = ["127.0.0.1"] * len(self.engines)
        if cluster.nodes > 1:
            hosts = results([keeper.__ray_call__.remote(_address) for keeper in self.engines], LOADING, "start")
        plans = [keeper.plan.remote(host) for keeper, host in zip(self.engines, hosts, strict=True)]
        urls = results(plans, LOADING, "plan a server")
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
            return results([self.ranks[0].deliver.remote(delivery)], STEPPING, "deliver weights")[0]
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
        address = results([self.ranks[0].__ray_call__.remote(_address)], LOADING, "start")[0]
        (port,) = results([self.ranks[0].host.remote(address)], LOADING, "start")
        ready = [engine.__ray_ready__.remote() for engine in self.engines]
        results([*[rank.load.remote(address, port) for rank in self.ranks], *ready], LOADING, "load the model")

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
            return results(calls, seconds, what)
        except BaseException:
            self._failed = True
            raise

    def _gpus_of(self, first: int, count: int) -> list[str]:
        """Of so many ranks from this one on, as Ray numbers GPUs on their machine."""
        ranks = self.ranks[first : first + count]
        return results([rank.__ray_call__.remote(_gpu) for rank in ranks], LOADING, "start")

    def _place(self, node: int, gpus: int) -> dict[str, Any]:
        where = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=node)
        return {"scheduling_strategy": where, "num_cpus": 1, "num_gpus": gpus}


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
            return results([getattr(self._keeper, method).remote(*arguments)], KEEPING, f"{method} a server")[0]
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
