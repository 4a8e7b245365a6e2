"""The launchers of one run: placed by Ray, and ended together."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vlmrl
from vlmrl.cluster import ClusterError
from vlmrl.cluster.launcher import Actor, Launcher, Node, results
from vlmrl.config import Config

PLACEMENT_SECONDS = 300.0  # until there is room for all programs
START_SECONDS = 300.0  # for Ray to start the launchers
STOP_SECONDS = 60.0
ADDRESS = "RAY_ADDRESS"  # the variable of Ray that names a running cluster


class Placement:
    """The launchers of a run's trainer ranks and servers. :meth:`close` ends them, and Ray if it was started here.

    They are named ``rank-0``, ``server-0`` and so on in ``namespace``. Ranks and servers are spread evenly over the nodes, in the same
    order; the first node is this one, if it has room.
    """

    def __init__(self, config: Config) -> None:
        self.namespace = f"vlmrl-{uuid.uuid4().hex[:8]}"
        self.ranks: list[Actor] = []
        self.nodes: list[Node] = []
        """Of the ranks."""
        self.servers: list[Actor] = []
        self._cluster = config.resolved_cluster
        self._room: PlacementGroup | None = None
        self._owns_ray = not ray.is_initialized()
        try:
            if self._owns_ray:
                _connect(config)
            self._room = _reserve(config)
            self._start(config)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return ray.get_runtime_context().gcs_address

    def close(self) -> None:
        """End all programs with their launchers."""
        actors, self.ranks, self.servers = [*self.ranks, *self.servers], [], []
        stops = [actor.stop.remote(False) for actor in actors]
        ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS) if stops else None
        for actor in actors:
            ray.kill(actor)
        if self._room is not None and ray.is_initialized():
            remove_placement_group(self._room)
            self._room = None
        if self._owns_ray:
            ray.shutdown()

    def _start(self, config: Config) -> None:
        cluster, room, order = self._cluster, self._room, self._order()
        assert room is not None
        shared = config.colocated

        def start(kind: str, number: int, of: int, gpus: int) -> Actor:
            where = PlacementGroupSchedulingStrategy(room, order[number * cluster.nodes // of])
            resources = {"scheduling_strategy": where, "num_cpus": 1, "num_gpus": gpus}
            named = {"name": f"{kind}-{number}", "namespace": self.namespace}
            return ray.remote(Launcher).options(**resources, **named).remote(str(Path.cwd()))

        count = cluster.num_ranks
        self.ranks = [start("rank", number, count, int(cluster.gpus > 0)) for number in range(count)]
        if config.has_servers and not config.external_servers:
            own, count = 0 if shared or not cluster.gpus else config.server.tp, cluster.num_engines
            self.servers = [start("server", number, count, own) for number in range(count)]
        nodes = results([actor.node.remote() for actor in [*self.ranks, *self.servers]], START_SECONDS, "start")
        self.nodes = nodes[: len(self.ranks)]

    def _order(self) -> list[int]:
        """The bundles of the nodes, that of this node first."""
        here, nodes = ray.get_runtime_context().get_node_id(), placement_group_table(self._room)["bundles_to_node_id"]
        return sorted(nodes, key=lambda bundle: (nodes[bundle] != here, bundle))


def _connect(config: Config) -> None:
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if not (address := os.environ.get(ADDRESS)):
        cpus = max(_programs(config), os.cpu_count() or 1)  # there may be fewer cores
        # The end of the terminal, which stops the run in order, would end Ray's programs, and with them the ranks.
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            # `local`: without an address Ray would join any cluster that it finds on this machine.
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        return
    path = [str(Path(vlmrl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    ray.init(address=address, runtime_env={"env_vars": environment}, **options)


def _programs(config: Config) -> int:
    """How many programs Ray places."""
    cluster = config.resolved_cluster
    return cluster.num_ranks + (cluster.num_engines if config.has_servers and not config.external_servers else 0)


def _reserve(config: Config) -> PlacementGroup:
    """A bundle of resources on each node."""
    cluster = config.resolved_cluster
    cpus = -(-_programs(config) // cluster.nodes)
    bundle = {"CPU": cpus} | ({"GPU": cluster.gpus // cluster.nodes} if cluster.gpus else {})
    room = placement_group([bundle] * cluster.nodes, strategy="STRICT_SPREAD")
    if not room.wait(PLACEMENT_SECONDS if os.environ.get(ADDRESS) else 30.0):
        remove_placement_group(room)
        raise ClusterError(
            f"no room on {cluster.nodes} nodes with {bundle} each (cluster.gpus {cluster.gpus}, cluster.nodes {cluster.nodes}): Ray "
            f"has {ray.cluster_resources()}, of which {ray.available_resources()} are free."
        )
    return room
