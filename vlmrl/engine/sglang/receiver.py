"""Weight updates over SGLang's HTTP API: paths, bodies and serialized tensors."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from vlmrl.engine.server_sync import HttpReceiver
from vlmrl.weight_sync.base import Bucket, WeightsRefused
from vlmrl.weight_sync.nccl import GroupAddress

DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`; SGLang also takes a device's UUID there


@dataclass
class SGLangReceiver(HttpReceiver):
    """One server as a :class:`~vlmrl.weight_sync.base.WeightReceiver`, for buckets, process groups and folders."""

    opens = "/begin_weight_update"
    closes = "/end_weight_update"

    def receive(self, bucket: Bucket, version: str | None) -> None:
        """As handles of GPU memory, or by value from a CPU. Each rank needs its own serialization: handles are reference-counted."""
        self.receive_parts([self.part(bucket) for _ in range(self.ranks)], version)

    def part(self, bucket: Bucket) -> str:
        return serialized(_own_memory(bucket.tensors()))

    def receive_parts(self, parts: Sequence[str], version: str | None) -> None:
        self.post("/update_weights_from_tensor", {"serialized_named_tensors": parts} | _version_fields(version))

    def join_group(self, group: GroupAddress) -> None:
        """SGLang gives its tensor parallel rank i the rank ``rank_offset`` + i, and keeps each group that it is not asked to leave."""
        if group.replaces is not None:
            with suppress(WeightsRefused):  # a server that was restarted has no such group
                self.post("/destroy_weights_update_group", {"group_name": group.replaces})
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.post("/init_weights_update_group", body)

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        body = {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        self.post("/update_weights_from_distributed", body | _version_fields(version))

    def load_folder(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": version}
        self.post("/update_weights_from_disk", body, self.folder_timeout)

    def end(self) -> None:
        self.post(self.closes, {})


def _version_fields(version: str | None) -> dict[str, Any]:
    """Fields of each bucket's request. The last one names the new weights, and flushes the caches of the old ones."""
    return {"flush_cache": version is not None} | ({} if version is None else {"weight_version": version})


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as CUDA IPC handles of their memory, others by value."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)  # the server may number the device differently
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


def serialized(tensors: Any) -> str:
    """Base64 of pickled tensors, as SGLang takes them. Tensors on a GPU must live until the server has answered."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


def _own_memory(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copies of tensors on a CPU, since pickling a view pickles all of its memory."""
    return [(name, tensor if tensor.is_cuda else tensor.clone()) for name, tensor in tensors]
