"""Servers under Ray: their processes, and the weights that the trainer ranks send them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from vlmrl.cluster import ClusterError
from vlmrl.cluster.calls import LOAD_SECONDS, SERVER_SECONDS, TRAINER_SECONDS, Actor, results
from vlmrl.cluster.payload import pickle_by_value
from vlmrl.cluster.ray_cluster import RayCluster, node_address
from vlmrl.cluster.workers import ServerWorker
from vlmrl.config import Config
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import Server
from vlmrl.engine.server_backend import ServedModel, ServerBackend, attached_servers, token_for
from vlmrl.types import Sample
from vlmrl.weight_sync.base import TransferResult, WeightUpdate
from vlmrl.weight_sync.ipc import IpcSender


class RayServerHost:
    """The :class:`~vlmrl.run.serving.ServerHost` of a run whose trainer ranks are Ray's actors."""

    def __init__(self, config: Config, cluster: RayCluster) -> None:
        self._config = config
        self._cluster = cluster
        self._rank_beside: dict[str, int] = {}  # by server's URL: the first rank on its GPUs

    @property
    def dtype(self) -> torch.dtype:
        return self._cluster.dtype

    @property
    def colocated(self) -> bool:
        return self._config.colocated

    @property
    def method(self) -> str:
        return "tensor" if self.colocated else "group"

    @property
    def shares_gpus(self) -> bool:
        return self.colocated

    @property
    def gpu_bytes(self) -> float | None:
        return self._cluster.ranks.gpu_bytes() if self.colocated else None

    def servers(self, backend: ServerBackend, model: ServedModel) -> list[Server]:
        """``cluster.num_engines`` servers with an actor each, or the running ones at ``urls``."""
        settings, resolved = backend.settings, self._config.resolved_cluster
        if settings.urls:
            return attached_servers(settings)
        logs, count = self._config.folder.absolute() / "servers", resolved.num_engines
        beside = [number * resolved.num_ranks // count for number in range(count)]
        for number, rank in enumerate(beside):
            shared = self._cluster.ranks.gpus(rank, settings.tp) if self.colocated else []
            own = settings.tp if resolved.gpus and not shared else 0
            given = backend, model, logs / f"server-{number}.log", resolved.gpus > 0, shared
            actor = self._cluster.start_actor(ServerWorker, *given, index=number, of=count, gpus=own)
            self._cluster.engines.append(actor)
        actors = self._cluster.engines
        hosts = ["127.0.0.1"] * len(actors)
        if resolved.nodes > 1:
            hosts = results([actor.__ray_call__.remote(node_address) for actor in actors], LOAD_SECONDS, "start")
        tokens = [token_for(backend, host) for host in hosts]
        plans = [actor.plan.remote(*each) for actor, *each in zip(actors, hosts, tokens, strict=True)]
        urls = results(plans, LOAD_SECONDS, "plan a server")
        if self.colocated:
            self._rank_beside = dict(zip(urls, beside, strict=True))
        found = zip(urls, actors, tokens, strict=True)
        return [Server(url, RemoteProcess(actor), token=token) for url, actor, token in found]

    def send(self, update: WeightUpdate) -> TransferResult:
        """All ranks gather the weights, and rank 0 sends them. A resend is from rank 0's copy.

        With handles of GPU memory, a colocated server gets the weights from the rank on its GPU.
        """
        pickle_by_value(update.sender)
        by_handle = isinstance(update.sender, type) and issubclass(update.sender, IpcSender)
        update = replace(update, by_value=by_handle and (update.resend or not self.colocated))
        ranks = self._cluster.ranks
        if not update.resend:
            updates = updates_by_rank(update, self._rank_beside if by_handle else {}, len(ranks))
            sent = ranks.run_each("send_update", [(each,) for each in updates], TRAINER_SECONDS, "send_update")
            return reduce(add, [result for result in sent if result is not None])
        try:
            return results([ranks.actors[0].send_update.remote(update)], TRAINER_SECONDS, "send_update")[0]
        except (RayError, ClusterError) as error:
            raise EngineError(f"rank 0 could not send the weights again: {error}") from error

    def score(self, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
        return self._cluster.ranks.logprobs(samples, temperature)

    def offload_trainer(self) -> bool:
        return self._cluster.ranks.offload()

    def close(self) -> None:
        self._cluster.close()


class RemoteProcess:
    """A server's process that a :class:`~vlmrl.cluster.workers.ServerWorker` runs. A lost actor counts as a dead process."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    @property
    def alive(self) -> bool:
        """True also if the actor is slow to answer: the caller does not wait, since it watches other servers too."""
        answer = self._actor.alive.remote()
        try:
            return not ray.wait([answer], timeout=1.0)[0] or ray.get(answer)
        except RayError:
            return False

    def start(self) -> None:
        self._call("start")

    def stop(self, gently: bool = True) -> None:
        with contextlib.suppress(EngineError):
            self._call("stop", gently)

    def log_tail(self) -> str:
        try:
            return self._call("log_tail")
        except EngineError as error:
            return f"; {error}"

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return results([getattr(self._actor, method).remote(*arguments)], SERVER_SECONDS, f"{method} a server")[0]
        except (RayError, ClusterError) as error:
            raise EngineError(f"the actor that runs the server's process does not answer: {error}") from error


def updates_by_rank(update: WeightUpdate, beside: dict[str, int], ranks: int) -> list[WeightUpdate | None]:
    """Each rank's update: to the servers ``beside`` it (by URL). Rank 0 keeps a copy, and also sends to servers beside no rank."""
    receivers = [tuple(each for each in update.receivers if beside.get(each.url, 0) == rank) for rank in range(ranks)]
    updates = [replace(update, receivers=each, keep=rank == 0) for rank, each in enumerate(receivers)]
    return [each if each.receivers or each.keep else None for each in updates]
