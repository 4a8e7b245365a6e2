"""The memory of one GPU in each phase of a step: rollout, forward and backward, optimizer step, weight update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmrl.config import Config
from vlmrl.engine.server_backend import new_backend
from vlmrl.model.loading import pick_checkpointing
from vlmrl.plan.activations import Gradients, MicroBatchSize, ModelShape, micro_batch_memory
from vlmrl.plan.gpus import GIB
from vlmrl.train.master_weights import STATE_BYTES
from vlmrl.weight_sync.base import BUCKET_BYTES

Parts = dict[str, float]
ROLLOUT = "rollout"

CONTEXT = 0.6 * GIB
"""Of each process that uses the GPU: the CUDA context, kernels, workspaces of cuBLAS. An assumption until it is measured."""
NCCL = 1.0 * GIB
"""Buffers of the collectives of several ranks. An assumption until it is measured."""
FRAGMENTED_LEAST, FRAGMENTED_SHARE = 2.0 * GIB, 0.04
"""What the caching allocator holds and no tensor uses: 0.6 to 2.2 GiB beside 2 to 59 GiB of activations on a simulated GPU."""
LEAST_CACHE = 1.0 * GIB
"""KV cache below which an engine is not worth starting."""


@dataclass(frozen=True)
class GpuSharing:
    """How trainer and engine share the run's GPUs."""

    ranks: int
    """Trainer ranks over which the trainer is sharded."""
    engine: bool
    """The run has its own engines; False: external servers."""
    served: bool
    """The engine is a server, a separate process."""
    together: bool
    """Engine and trainer are on the same GPUs."""
    offloads: bool
    """Each gives its memory back while the other works. Some servers keep their weights."""
    copies: bool
    """The engine has its own copy of the weights."""
    concurrent: bool = False
    """Rollouts go on while the trainer works (`train.max_staleness`): an engine on the same GPUs never sleeps."""


def phases_of(
    config: Config,
    shape: ModelShape,
    trainer: Parts,
    engine: Parts,
    trained: int,
    placement: GpuSharing,
    dtype: torch.dtype,
    memory: float,
    features: float = 0.0,
) -> dict[str, Parts]:
    """The parts on a GPU of ``memory`` bytes in each phase, in bytes. The rollout is on the engine's GPU.

    ``trainer`` and ``engine``: what stays from step to step on a GPU. ``trained``: parameters, on all ranks. ``features``: of images,
    which the embedded engine keeps during the rollout.
    """
    static = {name: size for name, size in trainer.items() if name != "gradients"}
    sleeping = _asleep(engine, placement, config, memory)
    releases = config.has_servers and new_backend(config).releases_weights(bool(config.model.lora.rank))
    asleep = {"server's context": CONTEXT} if releases and sleeping and not placement.concurrent else sleeping
    phases: dict[str, Parts] = {}
    if placement.engine:
        resident = static if placement.together and not placement.offloads else {}
        phases[ROLLOUT] = _awake(engine, placement, config, memory) | {
            f"trainer's {name}": resident[name] for name in resident
        }
    working = micro_batch_memory(shape, micro_batch_size(config, shape), gradients_of(config))
    working |= _gathered(shape, placement.ranks > 1, dtype)
    gradients = {"gradients": trainer["gradients"]}
    phases["forward and backward"] = static | gradients | working | asleep
    state = 8.0 * trained / placement.ranks
    if config.optim.offload:  # in parts; the embeddings' is one
        state = min(state, max(STATE_BYTES, 8.0 * shape.vocabulary * shape.hidden / placement.ranks))
    phases["optimizer step"] = static | {"optimizer state": state} | gradients | asleep
    if placement.engine and placement.copies:
        held = 2 + (placement.ranks > 1)  # one on its way, one being joined, and its weights if they are gathered
        buckets = {"buckets": float(held * BUCKET_BYTES)} if config.has_servers else {}
        phases["weight update"] = static | buckets | sleeping  # a trainer is moved to the GPU as a whole
    for name, parts in phases.items():
        if features and (name == ROLLOUT or placement.concurrent):
            parts["image features"] = features
        busy = sum(working.values()) if name == "forward and backward" else 0.0
        parts |= _reserve(busy, placement.ranks > 1)
    return phases


def gradients_of(config: Config) -> Gradients:
    """What the run trains, as far as it changes the backward pass."""
    lora, frozen = config.model.lora, set(config.model.freeze)
    return Gradients(
        checkpointed=pick_checkpointing(config.train.gradient_checkpointing, torch.device("cuda")),
        head=not lora.rank and "language_model" not in frozen,
        vision=lora.vision if lora.rank else "vision_tower" not in frozen,
        adapted=bool(lora.rank),
    )


def prompt_tokens(config: Config) -> int:
    """The longest prompt: `data.max_prompt_tokens`, or a quarter of a trajectory where that is unset."""
    longest = config.rollout.max_tokens
    return min(config.data.max_prompt_tokens or longest // 4, longest - 1)


def micro_batch_size(config: Config, shape: ModelShape) -> MicroBatchSize:
    """The largest micro-batch: full of the longest trajectories, with an image in the prompt and one after each turn but the last."""
    rollout = config.rollout
    tokens = max(config.train.tokens_per_micro_batch, rollout.max_tokens)
    prompt = prompt_tokens(config)
    if shape.image is None:
        return MicroBatchSize(tokens, tokens - prompt)
    rows = -(-(tokens - prompt) // (rollout.max_tokens - prompt))
    images = min(1 + rows * (rollout.max_turns - 1), tokens // shape.image.tokens)
    observed = rows * (rollout.max_turns - 1) * shape.image.tokens
    return MicroBatchSize(tokens, max(1, tokens - prompt - observed), images * shape.image.patches)


def image_features(config: Config, shape: ModelShape, engines: int) -> float:
    """Bytes of the image features that an embedded engine keeps during a rollout.

    They are those of each group's prompt and of each trajectory's later images. An image is one bfloat16 vector for each placeholder
    and for each of the vision tower's outputs.
    """
    if shape.vision is None or shape.image is None or config.engine != "embedded":
        return 0.0
    groups, rollout = config.train.groups_per_batch * config.rollout.over_sampling, config.rollout
    images = groups * (1 + rollout.group_size * (rollout.max_turns - 1)) / engines
    placeholders = shape.image.patches // shape.vision.patches_per_token
    return images * placeholders * 2 * shape.hidden * shape.vision.outputs


def _awake(engine: Parts, placement: GpuSharing, config: Config, memory: float) -> Parts:
    if not placement.served:
        return {part if part == "KV cache" else f"engine's {part}": size for part, size in engine.items()}
    context = CONTEXT if placement.together else 0.0  # beside the trainer's, which is in the reserve
    parts = {f"server's {part}": size for part, size in engine.items()}
    return parts | {"server's activations and graphs": new_backend(config).runtime_memory(memory) + context}


def _asleep(engine: Parts, placement: GpuSharing, config: Config, memory: float) -> Parts:
    """What the engine has on a trainer's GPU during a weight update: a sleeping server has released its KV cache alone."""
    if not placement.engine or not placement.together:
        return {}
    if placement.concurrent:
        return _awake(engine, placement, config, memory)
    if placement.served:
        return {
            "server's weights": engine["weights"],
            "server's graphs": new_backend(config).graph_memory(memory) + CONTEXT,
        }
    return {"engine's weights": engine["weights"]} if placement.copies and not placement.offloads else {}


def _gathered(shape: ModelShape, sharded: bool, dtype: torch.dtype) -> Parts:
    """FSDP2's buffers: the root and two layers in the compute dtype, one in use and one on its way, and one layer's gradient in it and
    in float32, in which gradients are reduced."""
    if not sharded:
        return {}
    gathered = dtype.itemsize * (shape.outside_layers + 2 * shape.largest_layer)
    return {"gathered layers": gathered + (dtype.itemsize + 4.0) * shape.largest_layer}


def _reserve(working: float, sharded: bool) -> Parts:
    """CUDA context, NCCL, and the allocator's fragmentation for ``working`` bytes of activations."""
    fragmented = max(FRAGMENTED_LEAST, FRAGMENTED_SHARE * working) if working else 0.0
    return {"reserve": CONTEXT + fragmented + (NCCL if sharded else 0.0)}
