"""Weights on their way to the engine actors, through Ray's object store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import ray
import torch
from ray.exceptions import TaskCancelledError

from vlmrl.cluster.calls import WEIGHTS_SECONDS, Actor, Ref, results
from vlmrl.cluster.payload import SerializedBucket
from vlmrl.weight_sync.base import NamedWeights, TransferResult, buckets

BUCKET_BYTES = 256 * 2**20


@dataclass
class RayEngineSender:
    """A :class:`~vlmrl.weight_sync.base.WeightSender` to ``engines``, which compute in ``dtype``. Rank 0 calls it.

    Raises ClusterError if an engine died or does not answer.
    """

    engines: tuple[Actor, ...]
    dtype: torch.dtype
    _loading: list[Ref] = field(default_factory=list, init=False)
    _aborted: bool = field(default=False, init=False)

    def send(self, weights: NamedWeights) -> TransferResult:
        started, size = time.perf_counter(), 0
        self._aborted = False
        for bucket in buckets(weights, BUCKET_BYTES, self.dtype):
            if self._aborted:
                continue  # the other ranks still gather each weight
            size += bucket.flat.nbytes
            stored = ray.put(SerializedBucket.of(bucket))
            self._wait()  # the engines load one bucket while the next is gathered
            self._loading = [engine.load_weights.remote(stored) for engine in self.engines]
        self._wait()
        failed = {"engines": "aborted"} if self._aborted else {}
        return TransferResult(size, time.perf_counter() - started, failed)

    def abort(self) -> None:
        self._aborted = True
        for call in self._loading:
            ray.cancel(call)

    def _wait(self) -> None:
        if self._aborted:
            self.abort()  # also cancels calls that began after the abort
        try:
            results(self._loading, WEIGHTS_SECONDS, "load_weights")
        except TaskCancelledError:
            if not self._aborted:
                raise
