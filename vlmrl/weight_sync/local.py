"""Weights to an engine in this process with its own copy of the model: under torchrun, or with ``train.max_staleness``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from vlmrl.weight_sync.base import NamedWeights, TransferResult


class LoadsWeights(Protocol):
    """A model that loads weights by name, such as :class:`vlmrl.model.policy.Policy`."""

    def load_weights(self, named: NamedWeights) -> None: ...


class LocalSender:
    """Copies each weight into ``target``. Weights not copied before an abort keep their old values."""

    def __init__(self, target: LoadsWeights) -> None:
        self._target = target
        self._aborted = False
        self._bytes = 0

    def send(self, weights: NamedWeights) -> TransferResult:
        started, self._aborted, self._bytes = time.perf_counter(), False, 0
        self._target.load_weights(self._until_aborted(weights))
        failed = {"local": "aborted"} if self._aborted else {}
        return TransferResult(self._bytes, time.perf_counter() - started, failed)

    def abort(self) -> None:
        self._aborted = True

    def _until_aborted(self, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            if not self._aborted:
                self._bytes += weight.nbytes
                yield name, weight
