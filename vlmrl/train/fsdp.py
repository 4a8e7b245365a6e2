"""Many trainer processes as one: FSDP2 shards the policy, rank 0 says what to do, and each rank computes its share.

Under ``torchrun`` every process runs the recipe. Rank 0 plays the episodes and has a :class:`RankZeroTrainer`, which is used like a
:class:`~vlmrl.train.trainer.Trainer`; the others :func:`follow`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vlmrl.model.policy import Policy
from vlmrl.train.ranks import Ranks
from vlmrl.train.trainer import Trainer
from vlmrl.types import Sample
from vlmrl.weight_sync.base import TransferResult, WeightSender

COLLECTIVE = timedelta(minutes=20)  # the longest that a rank waits for the others within a step
BETWEEN_STEPS = timedelta(days=7)  # and for the next batch

MakeTrainer = Callable[..., Trainer]


def join_ranks(backend: str) -> Ranks:
    """This process's place among those that ``torchrun`` started; ``Ranks()`` where it did not."""
    if not dist.is_torchelastic_launched():
        return Ranks()
    if not dist.is_initialized():
        if "nccl" in backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=COLLECTIVE)
    return Ranks(dist.get_rank(), dist.get_world_size())


def backend_of(device: torch.device) -> str:
    """What the ranks talk by: gloo between CPUs, and for tensors on GPUs NCCL."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def forget_unused() -> None:
    """Give back the GPU's memory that this process holds and nothing in it uses."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # of tensors that were sent as handles
        torch.cuda.empty_cache()


def shard(policy: Policy, dtype: torch.dtype) -> Policy:
    """Cut the float32 weights over all ranks, layer by layer; computes in ``dtype``, reduces gradients in float32.

    The policy is the one root, so that everything its forward runs has its weights at hand.
    """
    mesh = init_device_mesh(policy.device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    layers = set(policy.model._no_split_modules)
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    policy.lockstep = True
    return policy


def reshard(policy: Policy) -> None:
    """Let go of what a forward without gradient leaves gathered: until then ``parameters()`` are not this rank's own."""
    if isinstance(policy, FSDPModule):
        policy.reshard()


class RankZeroTrainer:
    """Rank 0's trainer. Each call is told to the other ranks first, and then made here."""

    def __init__(self, make: MakeTrainer, settings: dict[str, Any]) -> None:
        _tell("start", settings)
        self._trainer = make(**settings)

    @property
    def steps_done(self) -> int:
        return self._trainer.steps_done

    @property
    def scored(self) -> list[np.ndarray]:
        return self._trainer.scored

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        _tell("step", samples)
        return self._trainer.step(samples)

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        _tell("score", samples)
        return self._trainer.score(samples)

    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]:
        _tell("kl_by_trajectory", samples)
        return self._trainer.kl_by_trajectory(samples)

    def send_weights(self, sender: WeightSender) -> TransferResult:
        return sender.send(self.named_weights())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        _tell("named_weights")
        yield from self._trainer.named_weights()

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        _tell("named_adapters")
        yield from self._trainer.named_adapters()

    def save(self, checkpoint: Path) -> None:
        _tell("save", checkpoint)
        self._trainer.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        _tell("restore", checkpoint)
        self._trainer.restore(checkpoint)

    def close(self) -> None:
        _tell("close")
        self._trainer.close()


def dismiss() -> None:
    """Let the other ranks return from :func:`follow`."""
    _tell("dismiss")


def leave_ranks() -> None:
    """Part from the other ranks. Nothing of the groups may be left for the interpreter's end, where their threads abort it."""
    global _control
    dist.barrier(_orders())
    _control = None
    dist.destroy_process_group()
    gc.collect()


def follow(make: MakeTrainer) -> None:
    """Do what rank 0 says until it dismisses this rank."""
    trainer: Any = None
    while True:
        method, argument = _hear()
        if method == "dismiss":
            return
        if method == "start":
            trainer = make(**argument[0])
            continue
        result = getattr(trainer, method)(*argument)
        if isinstance(result, Iterator):  # weights are gathered from all ranks as they are walked through
            for _ in result:
                pass


_control: Any = None


def _orders() -> dist.ProcessGroup:
    """The group that rank 0's orders go through: a batch may be long in coming, a collective within a step may not."""
    global _control
    if _control is None:
        _control = dist.new_group(backend="gloo", timeout=BETWEEN_STEPS)
    assert isinstance(_control, dist.ProcessGroup)
    return _control


def _tell(method: str, *arguments: Any) -> None:
    dist.broadcast_object_list([(method, arguments)], src=0, group=_orders())


def _hear() -> tuple[str, tuple[Any, ...]]:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=0, group=_orders())
    return heard[0]
