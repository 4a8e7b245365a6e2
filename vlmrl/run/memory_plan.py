"""The memory plan of a run: its processes and the memory of each, computed from shapes before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from vlmrl.config import Config
from vlmrl.model.families import family_of
from vlmrl.model.loading import pick_device, pick_dtype, shapes_of
from vlmrl.model.policy import layer_kinds
from vlmrl.train.ranks import Ranks


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements in a model's tensors."""

    parameters: int
    trained_by_part: dict[str, int]
    """Trained parameters, adapters included, by the part of the model as `model.freeze` names it; a part without any is left out."""
    cached: int
    """Per token in the KV cache."""

    @property
    def trained(self) -> int:
        return sum(self.trained_by_part.values())

    @classmethod
    def of(cls, model: Any) -> Sizes:
        weights = dict(model.named_parameters())
        text = model.config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        layers = layer_kinds(model.config).count("full_attention")  # recurrent layers have no KV cache
        parts = family_of(model.config).parts
        trained: dict[str, int] = {}
        for name, weight in weights.items():
            if weight.requires_grad:
                part = next((part for part, pattern in parts.items() if re.search(pattern, name)), "other")
                trained[part] = trained.get(part, 0) + weight.numel()
        total = sum(weight.numel() for weight in weights.values())
        return cls(total, trained, 2 * layers * text.num_key_value_heads * head)


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

    @classmethod
    def of(cls, config: Config, sizes: Sizes, ranks: int) -> MemoryPlan:
        """``ranks``: the trainer ranks that ``torchrun`` started. A cluster starts its own."""
        cluster = config.resolved_cluster
        device = torch.device("cuda" if cluster.gpus else "cpu") if cluster.on else pick_device(config.model.device)
        dtype = pick_dtype(config.model.dtype, device)
        ranks = cluster.num_ranks if cluster.on else ranks
        embedded = config.engine == "embedded"
        engine = _cache(config, sizes, dtype) if embedded else {}
        placed_elsewhere = cluster.on and not embedded
        if not placed_elsewhere and (cluster.on or ranks > 1 or (config.train.max_staleness and embedded)):
            engine = {"weights": dtype.itemsize * sizes.parameters, **engine}
        trainer = _trainer(config, sizes, ranks, dtype)
        return cls(config.model.path, _where(config, device, ranks), ranks, dtype, sizes, trainer, engine)

    def __str__(self) -> str:
        parameters, trained = _count(self.sizes.parameters), _count(self.sizes.trained)
        parts = ", ".join(f"{part} {_count(number)}" for part, number in self.sizes.trained_by_part.items())
        dtype = str(self.dtype).removeprefix("torch.")
        each = "a trainer rank" if self.ranks > 1 else "trainer"
        lines = [
            f"model     {self.model}, {parameters} parameters, of which {trained} are trained ({parts}); {dtype}",
            f"placement {self.where}",
            f"memory    {each}: {_sizes_of(self.trainer)}, beside activations",
        ]
        return "\n".join(lines + ([f"          engine: {_sizes_of(self.engine)}"] if self.engine else []))


def plan_memory(config: Config, ranks: Ranks) -> MemoryPlan:
    """The plan of a config. It needs only the shapes of the model's weights."""
    return MemoryPlan.of(config, Sizes.of(shapes_of(config.model, config.models_dir)), ranks.size)


def _where(config: Config, device: torch.device, ranks: int) -> str:
    cluster = config.resolved_cluster
    if not cluster.on:
        beside = "the engine" if config.engine == "embedded" else "a copy of the weights for servers"
        return (
            f"one program on {ranks} ranks (FSDP2), {beside} beside rank 0"
            if ranks > 1
            else f"one process, on {device}"
        )
    trainer = f"{ranks} trainer ranks (FSDP2)" if ranks > 1 else "1 trainer"
    machines = f"{cluster.nodes} nodes" if cluster.nodes > 1 else "1 node"
    if config.attached:
        devices = f"{cluster.gpus} GPUs" if cluster.gpus else "the CPUs"
        return f"{trainer} on {devices} of {machines}, beside servers that run already"
    kind, several = "engine" if config.engine == "embedded" else f"{config.engine} server", cluster.num_engines > 1
    engines = f"{cluster.num_engines} {kind}{'s' * several}"
    if not cluster.gpus:
        return f"{trainer} and {engines} on the CPUs of {machines}"
    how = "colocated" if cluster.colocate else "apart"
    return f"{trainer} and {engines} on {cluster.gpus} GPUs of {machines}, {how}"


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
    if algo.kl_coef and (algo.reference is not None or not config.model.lora.rank):
        parts["reference"] = own * sizes.parameters / ranks
    return parts


def _cache(config: Config, sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    """The largest KV cache of one engine: every trajectory at its full length."""
    rollout = config.rollout
    started = config.train.groups_per_batch * rollout.group_size * rollout.over_sampling
    engines = config.resolved_cluster.num_engines if config.cluster.on else 1
    trajectories = min(rollout.max_concurrent, started) / engines
    return {"KV cache at most": trajectories * rollout.max_tokens * sizes.cached * dtype.itemsize}


def _sizes_of(parts: dict[str, float]) -> str:
    each = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
    return each if len(parts) == 1 else f"{each}: {_gigabytes(sum(parts.values()))}"


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number / 1e3:.1f} k"


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def server_memory_fraction(config: Config, sizes: Sizes, gpu_bytes: float) -> float:
    """The share of a GPU that a colocated server may use for its weights and KV cache."""
    raise NotImplementedError
