"""The trainer ranks as one trainer, for the driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from vlmrl.cluster.calls import MOVING
from vlmrl.cluster.ray_cluster import RayCluster
from vlmrl.cluster.workers import code_of
from vlmrl.config import Algo
from vlmrl.config.code import FILE_MODULE
from vlmrl.train.checkpoint import load_random, save_random
from vlmrl.train.trainer import Receive
from vlmrl.types import Sample


class RemoteTrainers:
    """Makes trainers on the ranks, one after the other."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def start(self, algo: Algo, **settings: Any) -> RemoteTrainer:
        code = code_of(algo)
        for _, _, function in code:
            module = getattr(function, "__module__", None) or ""
            if module.startswith(FILE_MODULE):  # a recipe's: no other process can import it
                ray.cloudpickle.register_pickle_by_value(sys.modules[module])
        self._cluster.ask("start", algo, code, settings)
        return RemoteTrainer(self._cluster)


class RemoteTrainer:
    """The ranks as one :class:`~vlmrl.train.trainer.Trainer`."""

    def __init__(self, cluster: RayCluster) -> None:
        self.steps_done = 0
        self.scored: list[np.ndarray] = []
        self._cluster = cluster

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        metrics = self._cluster.ask_about("step", samples)
        self.steps_done, self.scored = self._cluster.ask("read", "steps_done", "scored")
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self._cluster.ask_about("score", samples)

    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._cluster.ask_about("kl_by_trajectory", samples)

    def send_weights(self, receive: Receive) -> Any:
        return self._cluster.ask("send_weights", receive, seconds=MOVING)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_weights")

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_adapters")

    def save(self, checkpoint: Path) -> None:
        """Each rank writes its part: the folder must be one that all nodes see."""
        self._cluster.ask("call", "save", checkpoint.resolve(), seconds=MOVING)
        save_random(checkpoint, "driver")

    def restore(self, checkpoint: Path) -> None:
        self._cluster.ask("call", "restore", checkpoint.resolve(), seconds=MOVING)
        (self.steps_done,) = self._cluster.ask("read", "steps_done")
        load_random(checkpoint, "driver")

    def close(self) -> None:
        self._cluster.ask("call", "close")

    def _named(self, which: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._cluster.ask("weights", which, seconds=MOVING):
            yield name, weight.tensor()
