"""A run's processes as Ray's actors: placed, started and ended."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vlmrl
from vlmrl.cluster import ClusterError
from vlmrl.cluster.calls import LOAD_SECONDS, PLACEMENT_SECONDS, Actor, results
from vlmrl.cluster.payload import ImageObjects
from vlmrl.cluster.rank_actors import RankActors
from vlmrl.cluster.workers import EngineWorker, RankWorker
from vlmrl.config import Config, Lora, Rollout
from vlmrl.config.code import recipe_folder
from vlmrl.model.loading import pick_dtype
from vlmrl.train.ranks import Ranks

CONTROL_CALLS = 64  # concurrent calls of an engine, besides requests


class RayCluster:
    """Trainer ranks and embedded engines, placed and loaded. :meth:`close` ends them, and Ray if it was started here.

    All compute in ``dtype``. A run with servers has no embedded engines: :class:`~vlmrl.cluster.server_host.RayServerHost` adds
    the servers' actors to ``engines``.
    """

    def __init__(self, config: Config, keep_kv: bool) -> None:
        self.images = ImageObjects()
        self.ranks = RankActors(self.images)
        self.engines: list[Actor] = []
        self.dtype = pick_dtype(config.model.dtype, torch.device("cuda" if config.cluster.gpus else "cpu"))
        self._config = config
        self._resolved = config.resolved_cluster
        self._room: Any = None
        self._owns_ray = not ray.is_initialized()
        try:
            if self._owns_ray:
                _connect(config)
            self._room = _reserve(config)
            self._start(keep_kv)
        except BaseException:
            self.close()
            raise

    def start_actor(self, worker: type, *arguments: Any, index: int, of: int, gpus: int, **options: Any) -> Actor:
        """Start actor ``index`` of ``of`` actors that are spread evenly over the nodes. It gets ``gpus`` GPUs of its own."""
        node = index * self._resolved.nodes // of
        where = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=node)
        resources = {"scheduling_strategy": where, "num_cpus": 1, "num_gpus": gpus}
        return ray.remote(worker).options(**resources, **options).remote(*arguments)

    def close(self) -> None:
        for actor in [*self.ranks.actors, *self.engines]:
            ray.kill(actor)
        self.ranks.actors, self.engines = [], []
        if self._room is not None and ray.is_initialized():
            remove_placement_group(self._room)
            self._room = None
        if self._owns_ray:
            ray.shutdown()

    def _start(self, keep_kv: bool) -> None:
        plain, count = _for_workers(self._config), self._resolved.num_ranks
        gpus = int(self._resolved.gpus > 0)
        for rank in range(count):
            given = plain, Ranks(rank, count)
            self.ranks.actors.append(self.start_actor(RankWorker, *given, index=rank, of=count, gpus=gpus))
        if self._config.engine == "embedded":
            self._start_engines(plain, keep_kv)
        first = self.ranks.actors[0]
        address = results([first.__ray_call__.remote(node_address)], LOAD_SECONDS, "start")[0]
        (port,) = results([first.host.remote(address)], LOAD_SECONDS, "start")
        loading = [rank.load.remote(address, port) for rank in self.ranks.actors]
        ready = [engine.__ray_ready__.remote() for engine in self.engines]
        results([*loading, *ready], LOAD_SECONDS, "load the model")

    def _start_engines(self, plain: Config, keep_kv: bool) -> None:
        count = self._resolved.num_engines
        sampled = replace(plain, model=replace(plain.model, lora=Lora(), freeze=()))  # gets merged weights
        for number in range(count):
            rank = number * len(self.ranks) // count  # the rank whose GPU a colocated engine shares
            gpu = self.ranks.gpus(rank, 1)[0] if self._config.colocated else None
            own = int(self._resolved.gpus > 0 and gpu is None)
            calls = self._config.rollout.max_concurrent + CONTROL_CALLS
            given = sampled, keep_kv, gpu
            engine = self.start_actor(EngineWorker, *given, index=number, of=count, gpus=own, max_concurrency=calls)
            self.engines.append(engine)


def _connect(config: Config) -> None:
    cluster = config.resolved_cluster
    if cluster.address is None:
        cpus = max(_processes(config), os.cpu_count() or 1)  # there may be fewer cores
        # `local`: without an address Ray would join any cluster that it finds on this machine.
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
        return
    code: dict[str, Any] = {"py_modules": [str(Path(vlmrl.__file__).parent)]}
    folder = recipe_folder()
    if folder is not None:  # workers import the modules beside the recipe
        code |= {"working_dir": str(folder), "excludes": [f"/{Path(config.output_dir).name}/"]}
    ray.init(address=cluster.address, runtime_env=code, logging_level=logging.WARNING)


def _processes(config: Config) -> int:
    """How many processes Ray places."""
    return config.resolved_cluster.num_ranks + (0 if config.attached else config.resolved_cluster.num_engines)


def _reserve(config: Config) -> PlacementGroup:
    """A bundle of resources on each node."""
    cluster = config.resolved_cluster
    cpus = -(-_processes(config) // cluster.nodes)
    bundle = {"CPU": cpus} | ({"GPU": cluster.gpus // cluster.nodes} if cluster.gpus else {})
    room = placement_group([bundle] * cluster.nodes, strategy="STRICT_SPREAD")
    if not room.wait(PLACEMENT_SECONDS if cluster.address else 30.0):
        remove_placement_group(room)
        raise ClusterError(
            f"no room on {cluster.nodes} nodes with {bundle} each (cluster.gpus {cluster.gpus}, cluster.nodes {cluster.nodes}): Ray "
            f"has {ray.cluster_resources()}, of which {ray.available_resources()} are free."
        )
    return room


def _for_workers(config: Config) -> Config:
    """The part of a config that workers need: no code of the recipe's, and no path relative to the working directory."""
    model = replace(config.model, device="auto" if config.cluster.gpus else "cpu")
    rollout = Rollout(kv_cache_gib=config.rollout.kv_cache_gib)
    folder = str(Path(config.output_dir).resolve())
    return Config(model=model, rollout=rollout, train=config.train, output_dir=folder, seed=config.seed)


def node_address(_: Any) -> str:
    """An actor's machine, for ``__ray_call__``."""
    return ray.util.get_node_ip_address()
