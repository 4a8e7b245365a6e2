"""Settings of a run on a Ray cluster, and their rules with other settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlmrl.config.fields import Settings, positive
from vlmrl.config.servers import ServerSettings
from vlmrl.utils.require import require


@dataclass(frozen=True)
class Cluster(Settings):
    """Trainer ranks and servers that Ray starts on many GPUs and machines. By default the run is one process, without Ray."""

    section = "cluster"
    gpus: int = 0
    """Total GPUs of the run, over all nodes. 0: no Ray, unless `ranks` is set. Requires `pip install 'vlmrl[ray]'`.
    Ray is started on this machine for the run, unless the variable `RAY_ADDRESS` names a running cluster, such as `auto`."""
    ranks: int | None = None
    """Trainer ranks (FSDP2). Unset: one per GPU, or one for every second GPU if servers have GPUs of their own.
    With `gpus` 0, ranks run on CPUs."""
    engines: int | None = None
    """Inference servers that the run starts, also without Ray. Raise it when sampling is the slowest part of a step.
    Unset: one per rank if colocated, otherwise one per GPU without a rank; 1 without Ray and on CPUs.
    The embedded engine is not counted: it samples in the process of rank 0."""
    colocate: bool | None = None
    """Place ranks and servers on the same GPUs; each offloads its memory while the other works. False: GPUs of their own.
    Unset: True, unless `train.max_staleness` is above 0."""
    nodes: int = 1
    """Machines. Ranks and servers are spread evenly over them.
    Each must have the same Python environment, and see the recipe and `output_dir` under the same paths."""

    @property
    def on(self) -> bool:
        return self.gpus > 0 or self.ranks is not None

    @property
    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        return self.gpus // 2 if self.colocate is False else self.gpus

    @property
    def num_engines(self) -> int:
        if self.engines is not None:
            return self.engines
        if not self.gpus:
            return 1
        return self.gpus - self.num_ranks if self.colocate is False else self.num_ranks

    def servers_that_fit(self, tp: int) -> int:
        """Servers of ``tp`` GPUs on one machine each: on the ranks' GPUs if colocated, otherwise on the others."""
        if not self.colocate:
            return (self.gpus - self.num_ranks) // self.nodes // tp * self.nodes
        ranks = self.num_ranks // self.nodes
        return self.nodes * max((count for count in range(1, ranks // tp + 1) if ranks % count == 0), default=0)

    def __post_init__(self) -> None:
        require(self.gpus >= 0, "cluster.gpus", "0 (off) or more", self.gpus)
        positive("cluster", self, "ranks", "engines", "nodes")
        if not self.on:
            require(self.nodes == 1, "cluster.gpus", "set with cluster.nodes", 0)
            return
        for name, value in (("gpus", self.gpus), ("ranks", self.num_ranks)):
            require(value % self.nodes == 0, f"cluster.{name}", f"a multiple of cluster.nodes ({self.nodes})", value)
        if self.gpus and self.colocate:
            require(self.num_ranks <= self.gpus, "cluster.ranks", f"at most cluster.gpus ({self.gpus})", self.num_ranks)
            rule = f"a divisor of cluster.ranks ({self.num_ranks}), whose GPUs they share"
            require(self.num_ranks % self.num_engines == 0, "cluster.engines", rule, self.num_engines)
        elif self.gpus and self.colocate is False:
            require(
                self.num_ranks > 0 and self.num_ranks + self.num_engines <= self.gpus,
                "cluster.ranks and cluster.engines",
                f"together at most cluster.gpus ({self.gpus}), since engines have GPUs of their own",
                (self.num_ranks, self.num_engines),
            )


def resolve_cluster(cluster: Cluster, servers: ServerSettings | None, asynchronous: bool) -> Cluster:
    """``cluster`` with ``colocate`` chosen if unset, and as many servers as fit if ``engines`` is unset.

    ``servers``: None with the embedded engine. Raises ValueError if ``cluster`` has settings of servers then.
    """
    if servers is None:
        for name in ("engines", "colocate"):
            rule = "unset with engine embedded, which samples in the process of rank 0: set engine to a server program"
            require(getattr(cluster, name) is None, f"cluster.{name}", rule, getattr(cluster, name))
        return replace(cluster, engines=1, colocate=True) if cluster.on else cluster
    external = bool(servers.urls)
    if cluster.colocate is None:
        cluster = replace(cluster, colocate=external or not asynchronous)
    if not external and cluster.gpus and cluster.engines is None:
        cluster = replace(cluster, engines=max(1, cluster.servers_that_fit(servers.tp)))
    return cluster


def check_servers(servers: ServerSettings, cluster: Cluster, deterministic: bool) -> None:
    """Raises ValueError if the settings of servers contradict those of the resolved cluster or of the run."""
    if deterministic:
        raise ValueError("deterministic needs engine embedded: sampling of a server is not reproducible.")
    if not cluster.on:
        return
    rule = "0, its default, on a cluster: Ray assigns GPUs"
    require(servers.first_gpu == 0, "server.first_gpu", rule, servers.first_gpu)
    if cluster.gpus and not servers.urls:
        _check_server_gpus(cluster, servers)
        if cluster.colocate:
            rule = "tensor, disk or auto when servers share the ranks' GPUs: a process group (NCCL) needs distinct GPUs"
            require(servers.sync != "group", "server.sync", rule, servers.sync)


def _check_server_gpus(cluster: Cluster, servers: ServerSettings) -> None:
    """Raises ValueError unless all servers fit on the machines of ``cluster``, each on ``servers.tp`` GPUs of one machine."""
    tp, name = servers.tp, "server.tp"
    fitting, usable, most = cluster.servers_that_fit(tp), "GPUs with ranks", cluster.num_ranks // cluster.nodes
    if not cluster.colocate:
        usable, most = "GPUs without ranks", (cluster.gpus - cluster.num_ranks) // cluster.nodes
    require(tp <= most, name, f"at most {most}, the {usable} on one machine", tp)
    rule = f"at most {fitting}: each server needs {name} ({tp}) {usable} on one machine"
    require(cluster.num_engines <= fitting, "cluster.engines", rule, cluster.num_engines)
    if cluster.colocate:
        rule = f"a multiple of cluster.nodes ({cluster.nodes}) when servers share the ranks' GPUs"
        require(cluster.num_engines % cluster.nodes == 0, "cluster.engines", rule, cluster.num_engines)
