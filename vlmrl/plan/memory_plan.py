"""The memory plan of a run: its processes and the memory of each, computed from shapes before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlmrl.config import Config, Model
from vlmrl.engine.hf.budget import PREFILL_TOKENS, reserved_bytes
from vlmrl.engine.server_backend import new_backend
from vlmrl.families import family_of
from vlmrl.families.base import LargestImage
from vlmrl.model.loading import largest_image_of, pick_device, pick_dtype, shapes_of
from vlmrl.model.policy import cached_elements
from vlmrl.plan.activations import ModelShape
from vlmrl.plan.gpus import Gpu, gpu_at_hand
from vlmrl.plan.phases import (
    CONTEXT,
    LEAST_CACHE,
    NCCL,
    ROLLOUT,
    GpuSharing,
    Parts,
    image_features,
    phases_of,
)
from vlmrl.train.ranks import Ranks

TIGHT = 0.05
"""Share of a GPU by which contexts, NCCL, CUDA graphs and fragmentation, which are assumed, may exceed the plan."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements in a model's tensors."""

    parameters: int
    trained_by_part: dict[str, int]
    """Trained parameters, adapters included, by the part of the model as `model.freeze` names it; a part without any is left out."""
    cached: int
    """Per token in the KV cache."""
    shape: ModelShape | None = None
    """The widths of the model, from which activations are computed. ``None``: they are not planned."""

    @property
    def trained(self) -> int:
        return sum(self.trained_by_part.values())

    @classmethod
    def of(cls, model: Any, image: LargestImage | None = None) -> Sizes:
        weights = dict(model.named_parameters())
        parts = family_of(model.config).parts
        trained: dict[str, int] = {}
        for name, weight in weights.items():
            if weight.requires_grad:
                part = next((part for part, pattern in parts.items() if re.search(pattern, name)), "other")
                trained[part] = trained.get(part, 0) + weight.numel()
        total = sum(weight.numel() for weight in weights.values())
        return cls(total, trained, cached_elements(model.config), ModelShape.of(model, image))


def sizes_of_model(model: Model, models_dir: Path) -> Sizes:
    """The sizes of the model of these settings, and what its largest image costs."""
    return Sizes.of(shapes_of(model, models_dir), largest_image_of(model, models_dir))


@dataclass(frozen=True)
class MemoryPlan:
    """A run's processes, the dtype they compute in, and their memory by part, in bytes."""

    model: str
    where: str
    ranks: int
    """Trainer ranks."""
    dtype: torch.dtype
    sizes: Sizes
    trainer: dict[str, float]
    engine: dict[str, float]
    """Without weights if the engine shares the trainer's; empty for servers, which manage their own memory."""
    gpu: Gpu | None = None
    """The GPU that was planned for; ``None``: CPUs."""
    phases: dict[str, Parts] = field(default_factory=dict)
    """The parts on the fullest GPU in each phase of a step, in bytes. Empty without a GPU."""
    longest_cache: float = 0.0
    """The KV cache of all trajectories that are in progress on one GPU, at their longest."""

    @classmethod
    def of(cls, config: Config, sizes: Sizes, ranks: int, gpu: Gpu | None = None) -> MemoryPlan:
        """``ranks``: the trainer ranks that ``torchrun`` started. A cluster has its own number. ``gpu``: plan for this one."""
        cluster = config.resolved_cluster
        if config.has_servers:
            new_backend(config)  # raises ValueError for settings that a run would refuse
        if gpu is not None:
            device = torch.device("cuda")
        else:
            device = torch.device("cuda" if cluster.gpus else "cpu") if cluster.on else pick_device(config.model.device)
        dtype = pick_dtype(config.model.dtype, device)
        ranks = cluster.num_ranks if cluster.on else ranks
        embedded = config.engine == "embedded"
        copies = not embedded or ranks > 1 or bool(config.train.max_staleness)
        engine = {"KV cache at most": _longest_cache(config, sizes, dtype)} if embedded else {}
        if embedded and copies:
            engine = {"weights": dtype.itemsize * sizes.parameters, **engine}
        trainer = _trainer(config, sizes, ranks, dtype)
        phases: dict[str, Parts] = {}
        if gpu is not None and sizes.shape is not None:
            phases = _phases(config, sizes, sizes.shape, ranks, trainer, dtype, gpu, copies)
        longest = _served(config, sizes)[1]
        where = _where(config, device, ranks)
        return cls(config.model.path, where, ranks, dtype, sizes, trainer, engine, gpu, phases, longest)

    @property
    def peak(self) -> float:
        """Bytes on the fullest GPU in its fullest phase."""
        return max((sum(parts.values()) for parts in self.phases.values()), default=0.0)

    @property
    def training_peak(self) -> float:
        """Bytes at the fullest phase other than the rollout, whose KV cache takes what is left."""
        return max((sum(parts.values()) for name, parts in self.phases.items() if name != ROLLOUT), default=0.0)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache on a GPU with a trainer rank."""
        return sum(size for part, size in self.phases.get(ROLLOUT, {}).items() if "KV cache" in part)

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPU."""
        return self.gpu is None or self.peak <= self.gpu.memory

    @property
    def is_tight(self) -> bool:
        """It fits with less to spare than TIGHT of the GPU outside the rollout, whose KV cache takes what is left."""
        return self.gpu is not None and self.fits and self.training_peak > (1 - TIGHT) * self.gpu.memory

    def __str__(self) -> str:
        parameters, trained = _count(self.sizes.parameters), _count(self.sizes.trained)
        parts = ", ".join(f"{part} {_count(number)}" for part, number in self.sizes.trained_by_part.items())
        dtype = str(self.dtype).removeprefix("torch.")
        each = "a trainer rank" if self.ranks > 1 else "trainer"
        lines = [
            f"model     {self.model}, {parameters} parameters, of which {trained} are trained ({parts}); {dtype}",
            f"placement {self.where}",
        ]
        if self.phases:
            return "\n".join([*lines, *self._table()])
        lines.append(f"memory    {each}: {_sizes_of(self.trainer)}, beside activations")
        return "\n".join(lines + ([f"          engine: {_sizes_of(self.engine)}"] if self.engine else []))

    def _table(self) -> list[str]:
        """A line for each phase: its total, and its parts from the largest."""
        assert self.gpu is not None
        lines = [f"memory    of {self.gpu.name}, {_gigabytes(self.gpu.memory)}, computed for the longest trajectories:"]
        for name, parts in self.phases.items():
            total, listed = sum(parts.values()), sorted(parts.items(), key=lambda item: -item[1])
            each = ", ".join(f"{part} {_gigabytes(size)}" for part, size in listed if size >= 2**20)
            verdict = "" if total <= self.gpu.memory else " (does not fit)"
            lines.append(f"          {name}: {_gigabytes(total)}{verdict} = {each}")
        return lines + self._cache_line()

    def _cache_line(self) -> list[str]:
        """How the KV cache was chosen, if there is one beside the trainer."""
        if not self.cache:
            return []
        if self.cache >= self.longest_cache:
            return ["          the KV cache holds all trajectories in progress at their longest"]
        return [
            f"          the KV cache is what is left; all trajectories in progress at their longest would take "
            f"{_gigabytes(self.longest_cache)}, so some wait"
        ]


def plan_memory(config: Config, ranks: Ranks) -> MemoryPlan:
    """The plan of a config on the GPU at hand, or on CPUs. It needs only the shapes of the model's weights."""
    return MemoryPlan.of(config, sizes_of_model(config.model, config.models_dir), ranks.size, gpu_of(config))


def gpu_of(config: Config) -> Gpu | None:
    """The GPU at hand, if the run uses one."""
    cluster = config.resolved_cluster
    on_gpu = bool(cluster.gpus) if cluster.on else pick_device(config.model.device).type == "cuda"
    return gpu_at_hand() if on_gpu else None


def server_memory_fraction(config: Config, sizes: Sizes, gpu_bytes: float) -> float:
    """The share of a GPU of ``gpu_bytes`` that a colocated server may use for its weights and KV cache.

    It leaves room for the server's activations and CUDA graphs and for the contexts of both processes, and is no more than the
    longest trajectories need. A server applies the share to the memory that is free when it starts, so it may use less.

    Raises:
        ValueError: weights and the smallest useful KV cache do not fit.
    """
    weights, cache, least = _served(config, sizes)
    most = _server_share(config, gpu_bytes)
    if weights + least > most * gpu_bytes:
        raise ValueError(
            f"a server on a GPU of {_gigabytes(gpu_bytes)} has {_gigabytes(most * gpu_bytes)} for its weights and KV cache, but "
            f"the weights alone are {_gigabytes(weights)}: set server.tp to divide them over more GPUs, or place servers "
            "on GPUs of their own (cluster.colocate False)."
        )
    return min(most, (1.02 * cache + weights) / gpu_bytes)


def _server_share(config: Config, gpu_bytes: float) -> float:
    """What activations, CUDA graphs, the contexts of server and trainer, and NCCL leave of a GPU."""
    cluster = config.resolved_cluster
    collectives = NCCL if cluster.on and cluster.num_ranks > 1 else 0.0
    runtime = new_backend(config).runtime_memory(gpu_bytes)
    return max(0.0, 1 - (runtime + 2 * CONTEXT + collectives) / gpu_bytes)


def _served(config: Config, sizes: Sizes) -> tuple[float, float, float]:
    """Bytes on each GPU of a server: its weights, the KV cache of its share of the longest trajectories, and one for one of them."""
    tp = config.server.tp if config.has_servers else 1
    dtype = pick_dtype(config.model.dtype, torch.device("cuda"))
    cache = _longest_cache(config, sizes, dtype) / tp
    least = min(cache, max(LEAST_CACHE, cache / _trajectories(config)))
    return dtype.itemsize * sizes.parameters / tp, cache, least


def _longest_cache(config: Config, sizes: Sizes, dtype: torch.dtype) -> float:
    """Bytes of the largest KV cache of one engine: every trajectory at its full length."""
    return _trajectories(config) * config.rollout.max_tokens * sizes.cached * dtype.itemsize


def _phases(
    config: Config,
    sizes: Sizes,
    shape: ModelShape,
    ranks: int,
    trainer: Parts,
    dtype: torch.dtype,
    gpu: Gpu,
    copies: bool,
) -> dict[str, Parts]:
    cluster = config.resolved_cluster
    placement = placement_of(config, ranks, copies)
    features = image_features(config, shape, cluster.num_engines if cluster.on else 1)
    weights, cache, least = _served(config, sizes)
    engine = {"weights": weights} if copies else {}
    busy = 0.0  # of the trainer while the engine samples
    if placement.concurrent:
        trained_alone = phases_of(
            config, shape, trainer, {}, sizes.trained, replace(placement, engine=False), dtype, gpu.memory
        )
        busy = max(sum(parts.values()) for parts in trained_alone.values()) - CONTEXT
    if config.has_servers:
        share = _server_share(config, gpu.memory) * gpu.memory - weights - busy
        engine["KV cache"] = min(1.02 * cache, max(share, least))
    else:
        resident = placement.together and not placement.offloads
        static = sum(size for name, size in trainer.items() if name != "gradients") if resident else 0.0
        static = max(static, busy)
        reserve = CONTEXT + (NCCL if ranks > 1 else 0)
        free = gpu.memory - static - sum(engine.values()) - features - reserve
        engine |= _embedded(config, shape, cache, least, free, dtype)
    return phases_of(config, shape, trainer, engine, sizes.trained, placement, dtype, gpu.memory, features)


def placement_of(config: Config, ranks: int, copies: bool) -> GpuSharing:
    """Where trainer and engine are. ``copies``: the engine has its own copy of the weights."""
    cluster, served, external = config.resolved_cluster, config.has_servers, config.external_servers
    beside = bool(cluster.colocate) if cluster.on else ranks == 1 and config.server.first_gpu == 0
    together = not served or (beside and not external)  # the embedded engine is in the process of rank 0
    concurrent = together and bool(config.train.max_staleness)
    return GpuSharing(
        ranks=ranks,
        engine=not external,
        served=served,
        together=together,
        offloads=config.colocated if cluster.on else served and together and not concurrent,
        copies=copies,
        concurrent=concurrent,
    )


def _embedded(
    config: Config, shape: ModelShape, longest: float, least: float, free: float, dtype: torch.dtype
) -> Parts:
    """The embedded engine's KV cache and what it leaves free beside it, of ``free`` bytes. ``longest``: the largest KV cache."""

    def reserved(rows: float) -> float:
        return reserved_bytes(shape.hidden, shape.vocabulary, dtype.itemsize, rows, PREFILL_TOKENS)

    trajectories, limit = _trajectories(config), config.rollout.kv_cache_bytes
    row = longest / trajectories
    usable = free - reserved(0) if limit is None else limit
    rows = min(trajectories, max(1.0, usable / (row + reserved(1) - reserved(0) if limit is None else row)))
    cache = max(free - reserved(rows), least) if limit is None else limit
    return {"KV cache": min(longest, cache), "activations": reserved(rows)}


def _where(config: Config, device: torch.device, ranks: int) -> str:
    cluster, beside = config.resolved_cluster, "the engine beside rank 0"
    if not cluster.on and ranks == 1:
        return f"one process, on {device}"
    if not cluster.on:
        return f"one program on {ranks} ranks (FSDP2), {'servers beside rank 0' if config.has_servers else beside}"
    programs = f"{ranks} trainer ranks (FSDP2)" if ranks > 1 else "1 trainer"
    if config.external_servers:
        beside = "beside servers that run already"
    elif config.has_servers:
        count = cluster.num_engines
        programs += f" and {count} {new_backend(config).title} server{'s' * (count > 1)}"
        beside = "colocated" if cluster.colocate else "apart"
    devices = f"{cluster.gpus} GPUs" if cluster.gpus else "the CPUs"
    machines = f"{cluster.nodes} nodes" if cluster.nodes > 1 else "1 node"
    return f"{programs} on {devices} of {machines}, {beside}"


def _trainer(config: Config, sizes: Sizes, ranks: int, dtype: torch.dtype) -> dict[str, float]:
    """The memory of each rank. Several ranks shard float32 weights; a single rank has float32 masters beside bfloat16 weights."""
    own = dtype.itemsize if ranks == 1 else 4
    parts = {"weights": own * sizes.parameters / ranks}
    if own < 4:
        parts["masters"] = 4 * sizes.trained
    parts["gradients"] = 4 * sizes.trained / ranks
    if not config.optim.offload:
        parts["optimizer state"] = 8 * sizes.trained / ranks
    algo = config.algo
    if algo.kl_coef and not config.model.lora.rank:
        parts["reference"] = own * sizes.parameters / ranks
    if config.teacher.model not in (None, "self") and not config.teacher.servers[0]:
        average = 4 * sizes.trained if config.teacher.model == "average" and own < 4 else 0
        parts["teacher"] = own * sizes.parameters / ranks + average
    return parts


def _trajectories(config: Config) -> float:
    """The most trajectories in progress on one engine or server."""
    rollout = config.rollout
    batches = config.train.max_staleness + 1
    started = batches * config.train.groups_per_batch * rollout.group_size * rollout.over_sampling
    return min(rollout.max_concurrent, started) / config.resolved_cluster.num_engines


def _sizes_of(parts: dict[str, float]) -> str:
    each = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
    return each if len(parts) == 1 else f"{each}: {_gigabytes(sum(parts.values()))}"


def _count(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number / 1e3:.1f} k"


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
