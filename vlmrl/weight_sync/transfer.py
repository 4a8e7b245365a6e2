"""How weights travel to SGLang servers, from the process that holds them: in buckets, by one of three methods.

    deliver = WeightUpdate(targets=(Target("http://127.0.0.1:30000"),), method="tensor", name="run.3", ...)
    sent = deliver(trainer.named_weights())

A :class:`WeightUpdate` can be pickled, so that it can be carried out wherever the trainer is. The process that sends keeps the last
weights on the host, so that a server that comes back gets them whatever the trainer is doing.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

from vlmrl.utils.threads import DaemonPool

T = TypeVar("T")
Method = Literal["tensor", "group", "disk"]
NamedWeights = Iterable[tuple[str, torch.Tensor]]
DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`, which SGLang also takes as the device's UUID


class Refused(Exception):
    """A server answered that it will not take the weights."""


@dataclass(frozen=True)
class Target:
    """One server: its address, its tensor parallel size, and its kind of device."""

    url: str
    tp: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class TransferResult:
    """What a delivery did: bytes to each server, seconds, and the servers that do not have the weights now, with the reason.

    ``refused`` are those of ``failed`` that answered, and said no.
    """

    bytes: int
    seconds: float
    failed: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def __add__(self, other: TransferResult) -> TransferResult:
        """Of two deliveries of the same weights to different servers, side by side."""
        size, seconds = max(self.bytes, other.bytes), max(self.seconds, other.seconds)
        return TransferResult(size, seconds, self.failed | other.failed, self.refused + other.refused)


@dataclass
class Bucket:
    """Some weights of one dtype, one after the other in ``flat``."""

    names: list[str]
    shapes: list[torch.Size]
    flat: torch.Tensor

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The weights, as views of ``flat``."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = zip(self.names, self.shapes, self.flat.split(sizes), strict=True)
        return [(name, part.view(shape)) for name, shape, part in parts]

    def to(self, device: torch.device) -> Bucket:
        return Bucket(self.names, self.shapes, self.flat.to(device))


def buckets(weights: NamedWeights, max_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
    """Weights in their order, as many of one dtype as fit into ``max_bytes``; a larger one is a bucket of its own.

    Floating point weights wider than ``dtype`` are rounded to it.
    """
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, weight in weights:
        if dtype is not None and weight.is_floating_point() and weight.dtype.itemsize > dtype.itemsize:
            weight = weight.to(dtype)
        if waiting and (size + weight.nbytes > max_bytes or weight.dtype != waiting[0][1].dtype):
            yield _joined(waiting)
            waiting, size = [], 0
        waiting.append((name, weight.detach()))
        size += weight.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(weights: list[tuple[str, torch.Tensor]]) -> Bucket:
    flat = torch.cat([weight.reshape(-1) for _, weight in weights])
    return Bucket([name for name, _ in weights], [weight.shape for _, weight in weights], flat)


_kept: dict[str, list[Bucket]] = {}  # by run: the last weights this process sent, on the host


@dataclass(frozen=True)
class WeightUpdate:
    """Sends weights to all ``targets``, which compute in ``dtype`` and know them by ``name`` from then on; called where they are.

    Unless ``keep`` is False, the weights stay on the host for a server that comes back; with no targets, that is all.
    ``run`` tells the deliveries of one run from those of another. ``folder`` is where the method disk writes. With ``again`` it sends
    the last weights that this process kept, and not those it is given; with ``fill``, this number in place of every one of theirs.
    With ``by_value`` no handles of GPU memory are sent: a target is on another GPU than this process.
    """

    targets: tuple[Target, ...]
    method: Method
    name: str
    run: str
    bucket_bytes: int
    timeout: float
    dtype: torch.dtype | None = None
    folder: Path | None = None
    again: bool = False
    fill: float | None = None
    keep: bool = True
    by_value: bool = False

    def __call__(self, weights: NamedWeights) -> TransferResult:
        began = time.perf_counter()
        shipment = _Shipment(self)
        kept: list[Bucket] = []
        size = 0
        try:
            for bucket, last in _with_last(_kept[self.run] if self.again else self._pack(weights)):
                size += bucket.flat.nbytes
                if self.keep:
                    kept.append(bucket.to(torch.device("cpu")))
                shipment.send(bucket, last)
        finally:
            shipment.close()
        if self.keep and self.fill is None:
            _kept[self.run] = kept
        failed = {url: str(error) for url, error in shipment.failed.items()}
        refused = tuple(url for url, error in shipment.failed.items() if isinstance(error, Refused))
        return TransferResult(size, time.perf_counter() - began, failed, refused)

    @property
    def place(self) -> Path:
        """Where the method disk writes these weights."""
        assert self.folder is not None
        return self.folder / self.name

    def _pack(self, weights: NamedWeights) -> Iterator[Bucket]:
        for bucket in buckets(weights, self.bucket_bytes, self.dtype):
            if self.fill is not None:
                bucket.flat.fill_(self.fill)
            yield bucket


class _Shipment:
    """One delivery under way, to all targets at once. One that fails is left out from then on."""

    def __init__(self, delivery: WeightUpdate) -> None:
        self.failed: dict[str, Exception] = {}
        self._delivery = delivery
        self._carriers = {target.url: CARRIERS[delivery.method](delivery, target) for target in delivery.targets}
        self._threads = ThreadPoolExecutor(max(1, len(self._carriers)), "vlmrl-weights")
        self._number = 0

    def send(self, bucket: Bucket, last: bool) -> None:
        if not self._carriers:
            return
        if self._delivery.method == "disk":
            self._write(bucket)
        elif self._delivery.by_value:
            bucket = bucket.to(torch.device("cpu"))
        elif self._delivery.targets[0].device == "cuda":
            bucket = bucket.to(torch.device("cuda", torch.cuda.current_device()))
        self._all(lambda carrier: carrier.send(bucket, last))

    def close(self) -> None:
        """Also where sending failed: a server in the midst of an update takes no other."""
        with self._threads:
            list(self._threads.map(self._close_one, self._carriers))
        if self._delivery.method == "disk":
            shutil.rmtree(self._delivery.place, ignore_errors=True)

    def _close_one(self, url: str) -> None:
        try:
            self._carriers[url].close()
        except Exception as error:
            self.failed.setdefault(url, error)

    def _all(self, act: Callable[[Carrier], None]) -> None:
        going = [url for url in self._carriers if url not in self.failed]
        for url, future in [(url, self._threads.submit(act, self._carriers[url])) for url in going]:
            try:
                future.result()
            except Exception as error:
                self.failed[url] = error

    def _write(self, bucket: Bucket) -> None:
        folder = self._delivery.place
        folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        save_file(
            {name: part.cpu() for name, part in bucket.tensors()}, folder / f"model-{self._number:05d}.safetensors"
        )


class Carrier:
    """Takes the buckets of a delivery to one server."""

    def __init__(self, delivery: WeightUpdate, target: Target) -> None:
        self.delivery = delivery
        self.target = target
        self._open = False

    def send(self, bucket: Bucket, last: bool) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what :meth:`begin` began."""
        if self._open:
            self.post("/end_weight_update", {})

    def begin(self) -> None:
        if self._open:
            return
        try:
            self.post("/begin_weight_update", {})
        except Refused:  # somebody who is gone left one open
            self.post("/end_weight_update", {})
            self.post("/begin_weight_update", {})
        self._open = True

    def told(self, last: bool) -> dict[str, Any]:
        """What every part of an update says; the last one also names the weights, and has what the old ones computed forgotten."""
        return {"flush_cache": last} | ({"weight_version": self.delivery.name} if last else {})

    def post(self, path: str, body: dict[str, Any]) -> None:
        post(self.target.url, path, body, self.delivery.timeout)


class ByTensor(Carrier):
    """In the requests themselves: from a GPU that the server is on, too, handles of its memory (CUDA IPC); from a CPU, the values."""

    def send(self, bucket: Bucket, last: bool) -> None:
        self.begin()
        handles = [
            serialized(_apart(bucket.tensors())) for _ in range(self.target.tp)
        ]  # one for each rank: they are counted
        self.post("/update_weights_from_tensor", {"serialized_named_tensors": handles} | self.told(last))


class ByGroup(Carrier):
    """A process group of this process and the server's."""

    def send(self, bucket: Bucket, last: bool) -> None:
        key = self.delivery.run, self.target.url
        if key not in _groups or (self.delivery.again and not self._open):  # one that comes back may be another process
            _groups[key] = join(self.target, self.delivery.timeout)
        self.begin()
        name, group = _groups[key]
        body = {
            "names": bucket.names,
            "dtypes": [str(bucket.flat.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": name,
            "load_format": "flattened_bucket",
        }
        try:
            _beside(
                lambda: group.broadcast([bucket.flat.view(torch.uint8)], dist.BroadcastOptions()).wait(),
                lambda: self.post("/update_weights_from_distributed", body | self.told(last)),
            )
        except Exception:
            del _groups[key]  # who knows where its members stand
            raise


class ByDisk(Carrier):
    """A folder that both processes see. The server begins and ends the update by itself."""

    def send(self, bucket: Bucket, last: bool) -> None:
        if last:
            body = {"model_path": str(self.delivery.place), "load_format": "auto", "weight_version": self.delivery.name}
            self.post("/update_weights_from_disk", body)


CARRIERS: dict[str, type[Carrier]] = {"tensor": ByTensor, "group": ByGroup, "disk": ByDisk}
_groups: dict[tuple[str, str], tuple[str, Any]] = {}  # by run and server: the group's name there, and the group


class _Pickler(pickle.Pickler):
    """Pickles GPU tensors as CUDA IPC handles of their memory, others by value."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        device = str(torch.cuda.get_device_properties(value.device).uuid)  # it may have another number over there
        return rebuild, (*arguments[:DEVICE_ARGUMENT], device, *arguments[DEVICE_ARGUMENT + 1 :])


def serialized(tensors: Any) -> str:
    """Base64 of pickled tensors, as SGLang takes them. Those on a GPU must outlive their use over there."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


def _apart(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copies of those on a CPU, since a pickled view brings all of its memory along."""
    return [(name, tensor if tensor.is_cuda else tensor.clone()) for name, tensor in tensors]


def join(target: Target, timeout: float) -> tuple[str, Any]:
    """A new process group with a server, this process being rank 0: its name, and the group."""
    name = f"vlmrl-{uuid.uuid4().hex[:8]}"
    backend = "nccl" if target.device == "cuda" else "gloo"
    address, port = address_towards(target.url), free_port()
    body = {
        "master_address": address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": target.tp + 1,
        "group_name": name,
        "backend": backend,
    }
    group = _beside(
        lambda: _process_group(f"tcp://{address}:{port}", name, target.tp + 1, backend, timedelta(seconds=timeout)),
        lambda: post(target.url, "/init_weights_update_group", body, timeout),
    )
    return name, group


def _beside(ours: Callable[[], T], theirs: Callable[[], Any]) -> T:
    """Do our part of something while the server does its own. Where it refuses, ours is left to run into its time-out."""
    thread = DaemonPool("group")
    mine = thread.submit(ours)
    thread.close()
    theirs()
    return mine.result()


def _process_group(init_method: str, name: str, size: int, backend: str, timeout: timedelta) -> Any:
    """As SGLang makes its side of it; torch's public functions know only groups within the default one."""
    c10d: Any = distributed_c10d
    store, rank, size = next(c10d.rendezvous(init_method, 0, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    return group


def address_towards(url: str) -> str:
    """This machine's address, as the server at ``url`` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname or "127.0.0.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def post(url: str, path: str, body: dict[str, Any], timeout: float) -> Any:
    """POST as JSON. Raises Refused for an answer that is an error, and OSError where none comes."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            content = answer.read()
            return json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        raise Refused(f"{url}{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:2000]}") from error


def _with_last(items: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each item, and whether it is the last one."""
    waiting: Bucket | None = None
    for item in items:
        if waiting is not None:
            yield waiting, False
        waiting = item
    if waiting is not None:
        yield waiting, True
