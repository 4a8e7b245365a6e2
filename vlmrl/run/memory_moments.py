"""The memory of one GPU at each moment of a step: rollout, forward and backward, optimizer step, weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vlmrl.config import Config
from vlmrl.run.activations import Gradients, MicroBatchSize, ModelShape, micro_batch_memory
from vlmrl.run.gpus import GIB

Parts = dict[str, float]

CONTEXT = 0.6 * GIB
"""Of each process that uses the GPU: the CUDA context, kernels, workspaces of cuBLAS. An assumption until it is measured."""
NCCL = 1.0 * GIB
"""Buffers of the collectives of several ranks. An assumption until it is measured."""
FRAGMENTED_LEAST, FRAGMENTED_SHARE = 2.0 * GIB, 0.04
"""What the caching allocator holds and no tensor uses: 0.6 to 2.2 GiB beside 2 to 59 GiB of activations on a simulated GPU."""
ASSUMED_IMAGE = 512 * 512
"""Pixels of an image where `model.max_image_pixels` does not say."""
PREFILL = 2.0 * GIB
"""What the embedded engine computes prompts with. An assumption until it is measured."""
LEAST_CACHE = 1.0 * GIB
"""KV cache below which an engine is not worth starting."""


@dataclass(frozen=True)
class Placement:
    """What one GPU of the run holds."""

    ranks: int
    """Trainer ranks over which the trainer is sharded."""
    trains: bool
    """A rank of the trainer is on this GPU."""
    engines: int
    """Engines or servers over which the trajectories are divided; 0: none on this GPU."""
    served: bool
    """The engine is a server, a process of its own."""
    tensor_parallel: int
    offloads: bool
    """Trainer and engine give their memory back while the other works."""
    copies: bool
    """The engine has its own copy of the weights."""


def moments_of(
    config: Config,
    shape: ModelShape,
    trainer: Mapping[str, float],
    engine: Mapping[str, float],
    trained: int,
    parameters: int,
    placement: Placement,
    checkpointed: bool,
    dtype: torch.dtype,
    memory: float,
) -> dict[str, Parts]:
    """The parts on a GPU of ``memory`` bytes at each moment, in bytes. ``trainer`` and ``engine``: what stays from step to step."""
    sharded = placement.ranks > 1
    static = {name: size for name, size in trainer.items() if name != "gradients"} if placement.trains else {}
    update = _gathered(shape, parameters, sharded, dtype) if placement.trains else {}
    moments: dict[str, Parts] = {}
    if placement.engines:
        sleeping = _asleep(engine, placement, memory)
        beside = {} if placement.offloads else {f"trainer's {name}": size for name, size in static.items()}
        moments["rollout"] = _awake(engine, placement, memory) | beside
    else:
        sleeping = {}
    if placement.trains:
        gradients = Gradients(
            checkpointed,
            head=not config.model.lora.rank and "language_model" not in config.model.freeze,
            vision=_vision_trained(config),
            adapted=bool(config.model.lora.rank),
        )
        working = micro_batch_memory(shape, micro_batch_size(config, shape), gradients)
        held = static if not config.optim.offload else {k: v for k, v in static.items() if k != "optimizer state"}
        parts = held | {"gradients": trainer["gradients"]} | working | update | sleeping
        moments["forward and backward"] = parts | _reserve(sum(working.values()), sharded)
        moments["optimizer step"] = (
            static
            | _state(config, trained, placement)
            | {"gradients": trainer["gradients"]}
            | sleeping
            | _reserve(0, sharded)
        )
        if placement.engines and placement.copies:
            bucket = config.server_settings.bucket_mb * 2.0**20 if config.server_settings else 0.0
            weights = {"weights": static["weights"]} if placement.offloads else static
            moments["weight update"] = weights | {"bucket": bucket} | sleeping | _reserve(0, sharded)
    for parts in moments.values():
        if "reserve" not in parts:
            parts |= _reserve(0, sharded)
    return moments


def micro_batch_size(config: Config, shape: ModelShape) -> MicroBatchSize:
    """The largest micro-batch: full of the longest trajectories, each with one image in its prompt and one after each turn but the last."""
    rollout = config.rollout
    tokens = max(config.train.tokens_per_micro_batch, rollout.max_tokens)
    prompt = min(config.data.max_prompt_tokens or rollout.max_tokens // 4, rollout.max_tokens - 1)
    if shape.vision is None:
        return MicroBatchSize(tokens, tokens - prompt)
    image = -(-(config.model.max_image_pixels or ASSUMED_IMAGE) // shape.vision.pixels_per_token)
    rows = -(-(tokens - prompt) // (rollout.max_tokens - prompt))
    images = min(1 + rows * (rollout.max_turns - 1), tokens // image)
    observed = rows * (rollout.max_turns - 1) * image
    return MicroBatchSize(tokens, max(1, tokens - prompt - observed), images * image * shape.vision.patches_per_token)


def server_runtime(memory: float) -> float:
    """What SGLang keeps free for activations and CUDA graphs, beside weights and KV cache: its own estimate by the size of the GPU.

    Source: SGLang 0.5.23, srt/arg_groups/memory_hook.py: 512 MiB, 1.5 MiB for each token of a prefill chunk, 2 MiB for each sequence
    of the largest graph; on GPUs over 60 GiB at least 10 GiB.
    """
    gib = memory / GIB
    chunk, graph = next(
        (chunk, graph)
        for limit, chunk, graph in (
            (20, 2048, 8),
            (35, 4096, 48),
            (60, 4096, 32),
            (160, 8192, 256),
            (float("inf"), 16384, 512),
        )
        if gib < limit
    )
    estimate = (512 + 1.5 * chunk + 2 * graph) * 2**20
    return max(estimate, 10 * GIB) if gib > 60 else estimate


def server_graphs(memory: float) -> float:
    """What a sleeping server keeps of :func:`server_runtime`: its CUDA graphs."""
    return (0.5 * GIB) if memory < 60 * GIB else 1.0 * GIB


def _awake(engine: Mapping[str, float], placement: Placement, memory: float) -> Parts:
    if not placement.served:
        own = {f"engine's {name}" if name == "weights" else name: size for name, size in engine.items()}
        return own | {"engine's activations": PREFILL}
    contexts = CONTEXT if placement.offloads else 0.0
    return {"server's weights": engine["weights"], "server's KV cache": engine["KV cache"]} | {
        "server's activations and graphs": server_runtime(memory) + contexts
    }


def _asleep(engine: Mapping[str, float], placement: Placement, memory: float) -> Parts:
    """What an engine keeps on the GPU while the trainer works. A server that sleeps releases its KV cache alone."""
    if placement.served:
        if placement.offloads:
            return {"server's weights": engine["weights"], "server's graphs": server_graphs(memory) + CONTEXT}
        return {}
    if placement.offloads:
        return {}
    return {"engine's weights": engine["weights"]} if "weights" in engine else {}


def _gathered(shape: ModelShape, parameters: int, sharded: bool, dtype: torch.dtype) -> Parts:
    """FSDP2: the root and two layers in the compute dtype, one in use and one on its way, and their gradients before they are reduced
    in float32."""
    if not sharded:
        return {}
    width = dtype.itemsize
    return {
        "gathered layers": width * (shape.outside_layers + 2 * shape.largest_layer)
        + 4.0 * (shape.outside_layers + shape.largest_layer)
    }


def _state(config: Config, trained: int, placement: Placement) -> Parts:
    return {"optimizer state": 8.0 * trained / placement.ranks}


def _reserve(working: float, sharded: bool) -> Parts:
    """CUDA context, NCCL, and the allocator's fragmentation for ``working`` bytes of activations."""
    fragmented = max(FRAGMENTED_LEAST, FRAGMENTED_SHARE * working) if working else 0.0
    return {"reserve": CONTEXT + fragmented + (NCCL if sharded else 0.0)}


def _vision_trained(config: Config) -> bool:
    if config.model.lora.rank:
        return config.model.lora.vision
    return not {"vision_tower"} <= set(config.model.freeze)
