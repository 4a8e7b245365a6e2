"""Weights inside the requests: as handles of GPU memory (CUDA IPC) to a server on the same GPU, otherwise by value."""

from __future__ import annotations

from vlmrl.weight_sync.base import Bucket, WeightReceiver
from vlmrl.weight_sync.server_sender import CPU, ServerSender


class IpcSender(ServerSender[WeightReceiver]):
    """Receivers serialize a bucket on a GPU as handles, so it stays alive until all servers have answered."""

    def prepare(self, bucket: Bucket) -> Bucket:
        return bucket.to(CPU) if self.update.by_value else self.to_gpu_of_receivers(bucket)
