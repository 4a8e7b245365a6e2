"""The policy of several ranks: its shapes are sharded on the meta device, then filled by rank 0, one weight at a time.

A rank's GPU holds its shards and its part of one weight, rank 0's all of it. Only rank 0's process reads the checkpoint, in the
checkpoint's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from vlmrl.config import Model, Train
from vlmrl.model.loading import (
    draw_adapters,
    image_processor_of,
    pick_device,
    pick_dtype,
    prepare_layers,
    read_weights,
    shapes_of,
)
from vlmrl.model.policy import Policy
from vlmrl.train.fsdp import shard

Source = Callable[[str], torch.Tensor]
"""A whole weight, or a buffer, by its name in the policy's model."""


def load_sharded(config: Model, cache_dir: Path, seed: int, train: Train) -> Policy:
    """The policy of ``config`` over all ranks, with float32 weights. It computes in ``config.dtype``. Every rank calls this."""
    policy = _empty(config, cache_dir, train)
    _fill(policy, _source(policy, config, cache_dir, seed) if dist.get_rank() == 0 else None)
    return policy


@torch.no_grad()
def sharded_copy(policy: Policy, config: Model, cache_dir: Path, train: Train) -> Policy:
    """A frozen copy of this rank's shards of ``policy``, which was loaded with ``config``. Nothing is read or sent."""
    copied = _empty(config, cache_dir, replace(train, gradient_checkpointing=False))
    ours, theirs = (chain(each.parameters(), each.buffers()) for each in (copied, policy))
    for mine, current in zip(ours, theirs, strict=True):
        mine.copy_(current)
    return copied.requires_grad_(False)


def _empty(config: Model, cache_dir: Path, train: Train) -> Policy:
    """The sharded policy with its memory, on this rank's device, before any weight is known."""
    device = pick_device(config.device)
    model = shapes_of(_in_float32(config), cache_dir)
    policy = Policy(model, image_processor_of(config, cache_dir)).eval()
    prepare_layers(policy, train, device)
    return shard(policy, pick_dtype(config.dtype, device), device).to_empty(device=device)


def _source(policy: Policy, config: Model, cache_dir: Path, seed: int) -> Source:
    """The weights that one process would load.

    Raises:
        ValueError: the checkpoint has a weight that ``policy`` lacks. transformers ties a weight only where they are equal.
    """
    whole = read_weights(_in_float32(config), cache_dir, seed)
    weights = dict(whole.named_parameters())
    own = weights.keys() - {_plain(name) for name, _ in policy.model.named_parameters()}
    if own:
        raise ValueError(
            f"model.path {config.path}: several ranks need tie_word_embeddings false in its config.json, but it is true, and the "
            f"checkpoint has another {min(own)} than the embeddings."
        )
    tensors = weights | dict(whole.named_buffers())
    adapters = draw_adapters(_in_float32(config), cache_dir, seed) if config.lora.rank else {}
    return lambda name: adapters[name] if name in adapters else tensors[_plain(name)]


def _plain(name: str) -> str:
    """The name that a weight has without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def _fill(policy: Policy, source: Source | None) -> None:
    """Copy every weight and buffer of rank 0's ``source`` into ``policy``. ``None``: this is another rank."""
    for name, weight in policy.model.named_parameters():
        assert isinstance(weight, DTensor) and weight.placements == (Shard(0),), name
        _scatter(None if source is None else source(name), weight)
    for name, buffer in policy.model.named_buffers():
        if source is not None:
            buffer.copy_(source(name))
        dist.broadcast(buffer, src=0)


def _scatter(whole: torch.Tensor | None, into: DTensor) -> None:
    """Send each rank its rows of rank 0's ``whole``: the first ranks get equally many, the last ones may get fewer or none."""
    rows, shard = -(-into.shape[0] // dist.get_world_size()), into.to_local()
    received, parts = shard.new_empty(rows, *into.shape[1:]), None
    if whole is not None:
        padded = shard.new_empty(rows * dist.get_world_size(), *into.shape[1:])
        padded[: len(whole)] = whole
        parts = list(padded.split(rows))
    dist.scatter(received, parts, src=0)
    shard.copy_(received[: len(shard)])


def _in_float32(config: Model) -> Model:
    """With the dtype of sharded weights: they are the optimizer's master weights."""
    return replace(config, dtype="float32")
