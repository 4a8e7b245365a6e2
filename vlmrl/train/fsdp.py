"""FSDP2: the policy sharded over the trainer ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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


def shard(policy: Policy, dtype: torch.dtype) -> Policy:
    """Shard the float32 weights over all ranks, layer by layer. It computes in ``dtype`` and reduces gradients in float32.

    The policy itself is the FSDP root, so that the weights outside the layers are gathered for its whole forward.
    """
    mesh = init_device_mesh(policy.device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    layers = set(policy.model._no_split_modules)
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    policy.use_all_weights = True
    return policy


def reshard(policy: Policy) -> None:
    """Free the weights that a forward without gradient leaves gathered, so that ``parameters()`` are this rank's shards again."""
    if isinstance(policy, FSDPModule):
        policy.reshard()
