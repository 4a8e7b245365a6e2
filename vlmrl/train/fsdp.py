"""FSDP2: the policy sharded over the trainer ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vlmrl.model.policy import Policy

COLLECTIVE = timedelta(minutes=20)  # the longest that a rank waits for the others within a step


def backend_of(device: torch.device) -> str:
    """The ranks' communication backend: gloo for tensors on CPUs, NCCL for tensors on GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def forget_unused() -> None:
    """Free the GPU memory that this process's allocator caches and no tensor uses."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory of tensors that were sent as CUDA IPC handles
        torch.cuda.empty_cache()


def shard(policy: Policy, dtype: torch.dtype, device: torch.device) -> Policy:
    """Shard the float32 weights over all ranks, layer by layer. It computes in ``dtype`` and reduces gradients in float32.

    The weights are on ``device``, or on the meta device until ``to_empty(device=device)``.

    The policy itself is the FSDP root, so that the weights outside the layers are gathered for its whole forward. Between forward
    passes ``parameters()`` are this rank's shards, also after a pass without gradient.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # layers get float32 rotary cosines and masks, as without FSDP
    )
    layers = set(policy.model._no_split_modules)
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    policy.register_forward_hook(_reshard)  # runs after FSDP's own
    return policy


def _reshard(policy: Any, *_: Any) -> None:
    """After a forward without gradient, free the root's gathered weights in ``dtype``. FSDP keeps them until a backward pass."""
    if not torch.is_grad_enabled():
        policy.reshard()
