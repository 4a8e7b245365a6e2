"""Weight updates over SGLang's HTTP API: paths, bodies and serialized tensors."""

from __future__ import annotations

import base64
import io
import json
import pickle
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.multiprocessing import reductions

from vlmrl.utils.tokens import bearer
from vlmrl.weight_sync.base import Bucket, WeightsRefused
from vlmrl.weight_sync.nccl import GroupAddress

DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`; SGLang also takes a device's UUID there


@dataclass
class SGLangReceiver:
    """One server as a :class:`~vlmrl.weight_sync.base.WeightReceiver`, for buckets, process groups and folders."""

    url: str
    ranks: int = 1
    device: str = "cpu"
    dtype: torch.dtype | None = None
    timeout: float = 300.0
    token: str | None = field(default=None, repr=False)
    """Sent with every request."""
    _connections: set[HTTPConnection] = field(default_factory=set, init=False, repr=False, compare=False)
    _aborted: bool = field(default=False, init=False, repr=False, compare=False)

    def begin(self) -> None:
        try:
            self._post("/begin_weight_update", {})
        except WeightsRefused:  # an earlier sender died and left an update open
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def receive(self, bucket: Bucket, version: str | None) -> None:
        """As handles of GPU memory, or by value from a CPU. Each rank needs its own serialization: handles are reference-counted."""
        parts = [serialized(_own_memory(bucket.tensors())) for _ in range(self.ranks)]
        self._post("/update_weights_from_tensor", {"serialized_named_tensors": parts} | _version_fields(version))

    def join_group(self, group: GroupAddress) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self._post("/init_weights_update_group", body)

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        body = {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        self._post("/update_weights_from_distributed", body | _version_fields(version))

    def load_folder(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": version}
        self._post("/update_weights_from_disk", body)

    def end(self) -> None:
        self._post("/end_weight_update", {})

    def abort(self) -> None:
        self._aborted = True
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):  # closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the answer

    def _post(self, path: str, body: dict[str, Any]) -> None:
        """POST as JSON. Raises WeightsRefused if the server answers with an error, OSError if it does not answer."""
        address = urlsplit(self.url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.netloc, timeout=self.timeout)
        self._connections.add(connection)
        try:
            connection.connect()
            if self._aborted:
                raise ConnectionAbortedError(f"{self.url}{path}: the weight update was aborted")
            headers = {"Content-Type": "application/json", "Connection": "close"} | bearer(self.token)
            connection.request("POST", address.path + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            content = response.read()
        except HTTPException as error:
            raise ConnectionError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            self._connections.discard(connection)
            connection.close()
        if not 200 <= response.status < 300:
            message = content.decode(errors="replace")[:2000]
            raise WeightsRefused(f"{self.url}{path}: HTTP {response.status}: {message}")


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
