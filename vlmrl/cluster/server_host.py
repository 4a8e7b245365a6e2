"""Servers on the nodes of a cluster: rank 0 starts and watches them through the launchers beside them."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from vlmrl.cluster import RANK_VARIABLE, ClusterError
from vlmrl.cluster.launcher import Actor, results
from vlmrl.config import Config
from vlmrl.engine.base import EngineError
from vlmrl.engine.server import Launch, Server, external_servers
from vlmrl.engine.server_backend import ServedModel, ServerBackend

SERVER_SECONDS = 60.0  # for a launcher's answer


class RayServerHost:
    """The :class:`~vlmrl.run.serving.ServerHost` of a run that Ray has placed."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def colocated(self) -> bool:
        return self._config.colocated

    @property
    def shares_gpus(self) -> bool:
        return self.colocated

    @property
    def method(self) -> str:
        return "tensor" if self.colocated else "group"

    def servers(self, backend: ServerBackend, model: ServedModel) -> list[Server]:
        """``cluster.num_engines`` servers, each on a node with its launcher, or the running ones at ``urls``."""
        cluster = self._config.resolved_cluster
        if backend.settings.urls:
            external = external_servers(backend.settings.urls)
            for server in external:
                server.beside = ()
            return external
        namespace, count = _connect(), cluster.num_engines
        actors = [ray.get_actor(f"server-{number}", namespace) for number in range(count)]
        ranks = [ray.get_actor(f"rank-{number}", namespace) for number in range(cluster.num_ranks)]
        nodes = results([actor.node.remote() for actor in [*actors, *ranks]], SERVER_SECONDS, "node")
        hosts = [node.address if cluster.nodes > 1 else "127.0.0.1" for node in nodes[:count]]
        ports = results(
            [a.free_port.remote(h) for a, h in zip(actors, hosts, strict=True)], SERVER_SECONDS, "free_port"
        )
        servers = []
        for number, (actor, host, port) in enumerate(zip(actors, hosts, ports, strict=True)):
            first = number * cluster.num_ranks // count
            beside = tuple(range(first, first + backend.settings.tp)) if self.colocated else ()
            gpus = nodes[number].gpus
            if self.colocated:
                gpus = tuple(gpu for rank in beside for gpu in nodes[count + rank].gpus)
            token = backend.new_token(host)
            log = self._config.folder.absolute() / "servers" / f"server-{number}.log"
            launch = backend.launch(model, log, host, port, 0 if cluster.gpus else None)
            launch = launch if token is None else backend.with_token(launch, token)
            if cluster.gpus:
                launch = replace(launch, env=launch.env | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
            servers.append(Server(f"http://{host}:{port}", RemoteProcess(actor, launch), token=token, beside=beside))
        return servers


class RemoteProcess:
    """A server's process on the node of its launcher. A lost launcher counts as a dead process."""

    def __init__(self, actor: Actor, launch: Launch) -> None:
        self.launch = launch
        self._actor = actor

    @property
    def alive(self) -> bool:
        """True also if the launcher is slow to answer: the caller does not wait, since it watches other servers too."""
        answer = self._actor.alive.remote()
        try:
            return not ray.wait([answer], timeout=1.0)[0] or ray.get(answer)
        except RayError:
            return False

    def start(self) -> None:
        self._call("start", self.launch)

    def stop(self, graceful: bool = True) -> None:
        with contextlib.suppress(EngineError):
            self._call("stop", graceful)

    def log_tail(self) -> str:
        try:
            return self._call("log_tail")
        except EngineError as error:
            return f"; {error}"

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return results([getattr(self._actor, method).remote(*arguments)], SERVER_SECONDS, f"{method} a server")[0]
        except (RayError, ClusterError) as error:
            raise EngineError(f"the launcher of the server does not answer: {error}") from error


def _connect() -> str:
    """Join the Ray that has started this rank. Returns the namespace of the run's launchers."""
    address, _, namespace = os.environ[RANK_VARIABLE].partition(" ")
    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    return namespace
