"""Weights in the requests themselves: as handles of GPU memory (CUDA IPC) to a server on the same GPU, by value from a CPU."""

from __future__ import annotations

from vlmrl.weight_sync.base import Bucket, WeightReceiver
from vlmrl.weight_sync.server_sender import CPU, ServerSender, to_gpu_of


class IpcSender(ServerSender[WeightReceiver]):
    """A receiver serializes a bucket on a GPU as handles; the bucket lives until all servers have answered."""

    def prepare(self, bucket: Bucket) -> Bucket:
        return bucket.to(CPU) if self.update.by_value else to_gpu_of(self.update.receivers, bucket)
