"""The trainer ranks as one trainer, for the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlmrl.cluster.calls import WEIGHTS_SECONDS
from vlmrl.cluster.payload import pickle_by_value
from vlmrl.cluster.ranks import RankActors
from vlmrl.cluster.workers import functions_of
from vlmrl.config import Algo
from vlmrl.train.checkpoint import load_random, save_random
from vlmrl.types import Sample
from vlmrl.weight_sync.base import TransferResult, WeightSender


class RemoteTrainers:
    """Makes trainers on the ranks, one after the other."""

    def __init__(self, ranks: RankActors) -> None:
        self._ranks = ranks

    def start(self, algo: Algo, **settings: Any) -> RemoteTrainer:
        functions = functions_of(algo)
        for _, _, function in functions:
            pickle_by_value(function)
        self._ranks.run("start", algo, functions, settings)
        return RemoteTrainer(self._ranks)


class RemoteTrainer:
    """The ranks as one :class:`~vlmrl.train.trainer.Trainer`."""

    def __init__(self, ranks: RankActors) -> None:
        self.steps_done = 0
        self.scored: list[np.ndarray] = []
        self._ranks = ranks

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        metrics = self._ranks.run_on_samples("call_on", samples, "step")
        self.steps_done, self.scored = self._ranks.run("read", "steps_done", "scored")
        return metrics

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self._ranks.run_on_samples("call_on", samples, "score")

    def kl_by_trajectory(self, samples: Sequence[Sample]) -> dict[str, float]:
        return self._ranks.run_on_samples("call_on", samples, "kl_by_trajectory")

    def send_weights(self, sender: WeightSender) -> TransferResult:
        return self._ranks.run("send_weights", sender, seconds=WEIGHTS_SECONDS)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_weights")

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._named("named_adapters")

    def save(self, checkpoint: Path) -> None:
        """Each rank writes its part: all nodes must see the folder."""
        self._ranks.run("call", "save", checkpoint.resolve(), seconds=WEIGHTS_SECONDS)
        save_random(checkpoint, "driver")

    def restore(self, checkpoint: Path) -> None:
        self._ranks.run("call", "restore", checkpoint.resolve(), seconds=WEIGHTS_SECONDS)
        (self.steps_done,) = self._ranks.run("read", "steps_done")
        load_random(checkpoint, "driver")

    def close(self) -> None:
        self._ranks.run("call", "close")

    def _named(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._ranks.run("weights", method, seconds=WEIGHTS_SECONDS):
            yield name, weight.tensor()
