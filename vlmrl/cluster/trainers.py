"""The trainer ranks in Ray's actors as one trainer, for the driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from vlmrl.cluster.calls import MOVING, STEPPING
from vlmrl.cluster.ray_cluster import RayCluster
from vlmrl.cluster.workers import code_of
from vlmrl.config.code import FILE_MODULE
from vlmrl.train.checkpoint import load_random, save_random
from vlmrl.train.controller import RunTrainer
from vlmrl.train.trainer import Receive, TrainerSpec
from vlmrl.types import Sample


class RemoteTrainers:
    """Makes trainers on the ranks, one after the other."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def start(self, spec: TrainerSpec) -> RemoteTrainer:
        code = code_of(spec.algo)
        for _, _, function in code:
            module = getattr(function, "__module__", None) or ""
            if module.startswith(FILE_MODULE):  # a recipe's: no other process can import it
                ray.cloudpickle.register_pickle_by_value(sys.modules[module])
        self._cluster.ask("start", spec, code)
        return RemoteTrainer(self._cluster)


class RemoteTrainer(RunTrainer):
    """The ranks as one :class:`~vlmrl.train.trainer.Trainer`. Checkpoints need a folder that all nodes share."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def call(self, method: str, *arguments: Any) -> Any:
        return self._cluster.ask("call", method, *arguments, seconds=TIME_LIMITS.get(method, STEPPING))

    def call_on(self, method: str, samples: Sequence[Sample]) -> Any:
        return self._cluster.ask_about(method, samples)

    def iterate(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._cluster.ask("weights", method, seconds=MOVING):
            yield name, weight.tensor()

    def send_weights(self, receive: Receive) -> Any:
        return self._cluster.ask("send_weights", receive, seconds=MOVING)

    def save(self, checkpoint: Path) -> None:
        super().save(checkpoint.resolve())
        save_random(checkpoint, "driver")

    def restore(self, checkpoint: Path) -> None:
        super().restore(checkpoint.resolve())
        load_random(checkpoint, "driver")


TIME_LIMITS = {"save": MOVING, "restore": MOVING}
"""Seconds for calls that read or write the whole policy; :data:`STEPPING` for all others."""
