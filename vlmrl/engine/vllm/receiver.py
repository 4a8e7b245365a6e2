"""Weight updates over vLLM's HTTP API, to the weight transfer engine in `on_server/vlmrl_vllm/weight_updates.py`."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from vlmrl.engine.server_sync import HttpReceiver
from vlmrl.weight_sync.base import Bucket, WeightsRefused
from vlmrl.weight_sync.nccl import GroupAddress

AFTER_DEVICE = 7  # of the arguments of `rebuild_cuda_tensor`: the first one after the device
OFFSET = 3


@dataclass
class VLLMReceiver(HttpReceiver):
    """One server as a :class:`~vlmrl.weight_sync.base.WeightReceiver`, for buckets, process groups and folders."""

    opens = "/start_weight_update"
    closes = "/finish_weight_update"
    _version: str | None = field(default=None, init=False, repr=False, compare=False)

    def receive(self, bucket: Bucket, version: str | None) -> None:
        """As a handle of GPU memory, or by value from a CPU. Each rank needs its own handle: handles are reference-counted."""
        if bucket.flat.is_cuda:
            self.receive_parts([self.part(bucket) for _ in range(self.ranks)], version)
        else:
            self._update(self.part(bucket), version)

    def part(self, bucket: Bucket) -> dict[str, Any]:
        if bucket.flat.is_cuda:
            return _head(bucket) | {"handle": _handle(bucket.flat)}
        return _head(bucket) | {"values": base64.b64encode(bucket.flat.view(torch.uint8).numpy().tobytes()).decode()}

    def receive_parts(self, parts: Sequence[dict[str, Any]], version: str | None) -> None:
        self._update(list(parts), version)

    def join_group(self, group: GroupAddress) -> None:
        """A worker is in one group only: it leaves its last one."""
        fields = ("name", "host", "port", "first_rank", "size", "backend")
        info = {name: getattr(group, name) for name in fields} | {"timeout": self.timeout}
        self.post("/init_weight_transfer_engine", {"init_info": info})

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        self._update(_head(bucket), version)

    def load_folder(self, folder: Path, version: str) -> None:
        self.begin()
        self._update({"folder": str(folder)}, version, self.folder_timeout)
        self.end()

    def end(self) -> None:
        """Weights are loaded layer by layer, and the last layers now: the new name holds from here on.

        Keys, values and image features of the old weights are forgotten. Requests that wait in a pause lose theirs too, and keep their
        tokens. What the image processor has computed depends on no weights.
        """
        self.post(self.closes, {"weight_version": self._version})
        self._version = None
        response = json.loads(self.post("/reset_prefix_cache?reset_running_requests=true", {}))
        if not response["success"]:
            raise WeightsRefused(f"{self.url}: the prefix cache was not reset after the weight update")
        self.post("/reset_encoder_cache", {})

    def post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> bytes:
        """As for all servers. But a vLLM whose workers have died answers for a while, with errors: it has refused nothing."""
        try:
            return super().post(path, body, timeout)
        except WeightsRefused as refusal:
            try:
                self.get("/health")
            except WeightsRefused:
                raise ConnectionError(str(refusal)) from refusal
            raise

    def _update(
        self, info: dict[str, Any] | list[dict[str, Any]], version: str | None, timeout: float | None = None
    ) -> None:
        self.post("/update_weights", {"update_info": info}, timeout)
        self._version = version


def _head(bucket: Bucket) -> dict[str, Any]:
    """What the tensor with a bucket's values contains."""
    return {
        "names": bucket.names,
        "shapes": [list(shape) for shape in bucket.shapes],
        "dtype": str(bucket.flat.dtype).removeprefix("torch."),
    }


def _handle(flat: torch.Tensor) -> dict[str, Any]:
    """A tensor on a GPU as a CUDA IPC handle in JSON. It must live until the server has answered."""
    _, arguments = reductions.reduce_tensor(flat)
    memory = [
        base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in arguments[AFTER_DEVICE:]
    ]
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)  # the server may number the device differently
    return {"device": uuid, "offset": arguments[OFFSET], "memory": memory}
