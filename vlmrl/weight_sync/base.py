"""Weight updates from the trainer to the engine.

    update = WeightUpdate(receivers=(receiver,), sender=SENDERS["tensor"], version="run.3", bucket_bytes=2**29)
    result = update.send(policy_weights, SenderState())

A :class:`WeightSender` sends named weights from the process that holds them; each way of sending has a line in
:data:`vlmrl.weight_sync.SENDERS`. :class:`ServerSender` is the base class of ours: buckets, a thread per server, failures, the kept
copy, aborts. A :class:`WeightReceiver` is one server's end, made by its backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, runtime_checkable

import torch

from vlmrl.model.lora import rounded
from vlmrl.utils.current_gpu import current_gpu
from vlmrl.utils.host_memory import HostMemory
from vlmrl.utils.threads import DaemonPool

CPU = torch.device("cpu")
NamedWeights = Iterable[tuple[str, torch.Tensor]]
Calls = dict[str, Future[None]]  # to servers, by URL

BUCKET_BYTES = 512 * 2**20
"""Weights that are sent at once: few calls for a large model, and little of a colocated GPU's memory."""


class WeightsRefused(Exception):
    """A server answered a weight update with an error."""


@dataclass
class Bucket:
    """Some weights of one dtype: ``flat`` ``[sum of sizes]`` holds them one after the other, each with a name and a shape."""

    names: list[str]
    shapes: list[torch.Size]
    flat: torch.Tensor
    last: bool = False
    """The last one of an update."""

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The weights, as views of ``flat``."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = zip(self.names, self.shapes, self.flat.split(sizes), strict=True)
        return [(name, part.view(shape)) for name, shape, part in parts]

    def to(self, device: torch.device) -> Bucket:
        return replace(self, flat=self.flat.to(device))


def buckets(weights: NamedWeights, max_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
    """Weights in their order, each bucket of one dtype and at most ``max_bytes``; a larger weight is a bucket of its own.

    Floating point weights wider than ``dtype`` are rounded to it.
    """
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, weight in weights:
        weight = rounded(weight, dtype)
        if waiting and (size + weight.nbytes > max_bytes or weight.dtype != waiting[0][1].dtype):
            yield _joined(waiting)
            waiting, size = [], 0
        waiting.append((name, weight.detach()))
        size += weight.nbytes
    if waiting:
        yield _joined(waiting, last=True)


def _joined(weights: list[tuple[str, torch.Tensor]], last: bool = False) -> Bucket:
    flat = torch.cat([weight.reshape(-1) for _, weight in weights])
    return Bucket([name for name, _ in weights], [weight.shape for _, weight in weights], flat, last)


class KeptWeights:
    """The last weights that were sent, in host memory that is allocated once: a copy of all weights for a resend.

    A bucket is copied on a stream of its own while it is sent and while the next one is gathered.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        """None: there are none, or only a part of an update."""
        self.buckets: list[Bucket] = []
        self._memory = HostMemory()
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        self.version, self.buckets = None, []

    def add(self, bucket: Bucket) -> None:
        number, gpu = len(self.buckets), bucket.flat
        if gpu.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(gpu.device)
            self._stream.wait_stream(torch.cuda.current_stream(gpu.device))
            gpu.record_stream(self._stream)  # so that its memory is not used again before it is copied
        with current_gpu(gpu.device), torch.cuda.stream(self._stream):
            self.buckets.append(replace(bucket, flat=self._memory.copy_of(number, gpu)))

    def end(self, version: str) -> None:
        """All weights were added."""
        if self._stream is not None:
            self._stream.synchronize()
        self.version = version


@dataclass(frozen=True)
class TransferResult:
    """The outcome of one transfer."""

    bytes: int
    """Sent to each receiver."""
    seconds: float
    failed: dict[str, str] = field(default_factory=dict)
    """Why a server does not have the weights now, by URL."""
    refused: tuple[str, ...] = ()
    """The URLs in ``failed`` whose servers answered with an error."""

    def __add__(self, other: TransferResult) -> TransferResult:
        """The result of two concurrent transfers of the same weights to different servers."""
        size, seconds = max(self.bytes, other.bytes), max(self.seconds, other.seconds)
        return TransferResult(size, seconds, self.failed | other.failed, self.refused + other.refused)


class WeightSender(Protocol):
    """Sends the named weights of one update to its servers."""

    def send(self, weights: NamedWeights) -> TransferResult:
        """Iterate over all ``weights`` and send them. Gathering them may be a collective of all ranks, so an abort does not stop
        the iteration."""
        ...

    def abort(self) -> None:
        """Stop a :meth:`send` that runs in another thread: it iterates to the end without sending, and returns.

        Called before :meth:`send`, if the update was aborted before it began.
        """
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """One server's end of weight updates, implemented by its backend. It must pickle: the process that sends calls it.

    Calls block. They raise WeightsRefused if the server answers with an error, OSError if it does not answer.
    """

    url: str
    ranks: int
    """Tensor parallel processes of the server."""
    device: str
    """``cuda`` or ``cpu``."""
    dtype: torch.dtype | None
    """The server's dtype. None: unknown, so weights are sent as they are."""
    timeout: float
    """Time limit of a call in seconds."""

    def begin(self) -> None:
        """Open an update. One that an earlier sender left open is closed first."""
        ...

    def receive(self, bucket: Bucket, version: str | None) -> None:
        """Load a bucket. ``version``, given with the last one, names the new weights: caches of the old ones are flushed."""
        ...

    def end(self) -> None:
        """Close the update."""
        ...

    def abort(self) -> None:
        """Make calls that run in other threads fail now, and all later ones."""
        ...


@runtime_checkable
class PartsReceiver(WeightReceiver, Protocol):
    """A server whose tensor parallel ranks open memory on different GPUs, each that of the trainer rank beside it."""

    def part(self, bucket: Bucket) -> Any:
        """What one rank of the server takes for a bucket. It pickles, and needs the bucket until it was received."""
        ...

    def receive_parts(self, parts: Sequence[Any], version: str | None) -> None:
        """As :meth:`receive`, with a part for each rank of the server, in their order."""
        ...


@dataclass(frozen=True)
class Group:
    """A process group with servers."""

    name: str
    handle: Any
    """torch's group. None: it was aborted."""
    members: tuple[str, ...]
    """The servers' URLs, in the order of their ranks."""


@dataclass
class SenderState:
    """What senders keep from one update of a run to the next. Each process that sends owns one, for as long as its run lasts."""

    kept: KeptWeights = field(default_factory=KeptWeights)
    """The last weights that were sent to stay."""
    gpu: torch.device | None = None
    """The GPU that the last weights were on."""
    group: Group | None = None
    """The process group of this process and the servers."""
    joined: dict[str, str] = field(default_factory=dict)
    """The name of the last group that each server was asked to join, by URL: a server that was away is in an older one."""
    collect: Callable[[Any, Sequence[int]], list[Any]] | None = None
    """Collects an object of each of these trainer ranks on the first one; the others get an empty list, and wait for it."""


@dataclass(frozen=True)
class WeightUpdate:
    """One update of servers' weights: all that a sender needs. It pickles, for the other trainer ranks."""

    receivers: tuple[WeightReceiver, ...]
    """If empty, the weights are only kept for a resend."""
    sender: Callable[[WeightUpdate, SenderState], WeightSender]
    """The way of sending: a value of :data:`vlmrl.weight_sync.SENDERS`."""
    version: str
    """The servers' name for these weights."""
    bucket_bytes: int
    dtype: torch.dtype | None = None
    """Wider weights are rounded to it."""
    folder: Path | None = None
    """Parent folder of the files that a sender writes."""
    resend: bool = False
    """Send the weights that this process kept from the last update instead of the given ones."""
    fill: float | None = None
    """Send this number in place of every value."""
    keep: bool = True
    """Keep the weights in host memory, for a resend."""
    by_value: bool = False
    """Send values instead of handles of GPU memory, because a server is not on this process's GPU."""
    beside: tuple[int, ...] = ()
    """Trainer ranks that all send this update, each a handle of its own GPU's memory, one for each rank of the one receiver. The
    first calls the server. Empty: this process's handles are for all ranks."""
    aborted: Future[None] = field(default_factory=Future, repr=False, compare=False)
    """Done when the update was aborted in this process. A copy made by ``replace`` has the same one, a pickled copy another."""

    def send(self, weights: NamedWeights, state: SenderState | None = None) -> TransferResult:
        """Send from this process. :meth:`abort` stops it from another thread. Without a ``state`` nothing is kept for a resend."""
        sender = self.sender(self, SenderState() if state is None else state)
        self.aborted.add_done_callback(lambda _: sender.abort())  # at once, if it was aborted before it began
        return sender.send(weights)

    def abort(self) -> None:
        """Stop sending. An update that has not begun will send nothing."""
        with suppress(InvalidStateError):  # aborted before
            self.aborted.set_result(None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "aborted"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, aborted=Future())


Receiver = TypeVar("Receiver", bound=WeightReceiver)


class ServerSender(Generic[Receiver]):
    """Sends one update to all its servers concurrently. A server that fails gets no further buckets.

    This class passes each bucket to :meth:`WeightReceiver.receive`. A subclass overrides :meth:`prepare`, :meth:`deliver` or
    :meth:`start`, and :meth:`finish`, and names in ``needs`` the receiver protocol that it calls.
    """

    needs: ClassVar[type] = WeightReceiver

    def __init__(self, update: WeightUpdate, state: SenderState) -> None:
        self.update = update
        self.state = state
        self.failed: dict[str, BaseException] = {}
        for receiver in update.receivers:
            if not isinstance(receiver, self.needs):
                raise ValueError(
                    f"{type(self).__name__} needs a {self.needs.__name__}, but {receiver.url} has a {type(receiver).__name__}: choose "
                    "another `sync`."
                )
        self.receivers = {receiver.url: cast(Receiver, receiver) for receiver in update.receivers}
        self._begun: set[str] = set()

    def prepare(self, bucket: Bucket) -> Bucket:
        """Called once for each bucket. Returns the bucket to deliver, for example on another device."""
        return bucket

    def to_gpu_of_receivers(self, bucket: Bucket) -> Bucket:
        """``bucket`` on the trainer's GPU if any server has a GPU; else as it is.

        This thread's current device would be GPU 0, whichever the trainer's is.
        """
        if all(receiver.device != "cuda" for receiver in self.receivers.values()):
            return bucket
        return bucket.to(self.state.gpu or torch.device("cuda", torch.cuda.current_device()))

    def deliver(self, receiver: Receiver, bucket: Bucket, version: str | None) -> None:
        """Send a prepared bucket to one server. Runs in a thread per server; ``version`` is given with the last bucket."""
        self.begin(receiver)
        receiver.receive(bucket, version)

    def start(self, threads: DaemonPool, receivers: list[Receiver], bucket: Bucket, version: str | None) -> Calls:
        """Begin to send a prepared bucket to these servers: :meth:`deliver`, in a thread for each."""
        return {receiver.url: threads.submit(self.deliver, receiver, bucket, version) for receiver in receivers}

    def finish(self) -> None:
        """Called at the end, also after an error."""

    def begin(self, receiver: Receiver) -> None:
        """Open the update at this server, unless it is open already."""
        if receiver.url not in self._begun:
            receiver.begin()
            self._begun.add(receiver.url)

    def send(self, weights: NamedWeights) -> TransferResult:
        started = time.perf_counter()
        kept, size, resend = self.state.kept, 0, self.update.resend
        keep = self.update.keep and self.update.fill is None and not resend
        version = kept.version if resend else self.update.version
        assert version is not None, "a resend without weights that were sent"
        if keep:
            kept.begin()
        threads = DaemonPool("weights", max(1, len(self.receivers)))
        calls: Calls = {}
        try:
            for bucket in kept.buckets if resend else self._buckets(weights):
                size += bucket.flat.nbytes
                if keep:
                    kept.add(bucket)
                # The servers have the bucket before this one, which they took while this one was gathered.
                self._wait(calls)
                calls = self._deliver_to_all(threads, bucket, version if bucket.last else None)
            self._wait(calls)
            if keep:
                kept.end(version)
        finally:
            self._wait(calls)
            self._end_all(threads)
            threads.close()
            self.finish()
        refused = tuple(url for url, error in self.failed.items() if isinstance(error, WeightsRefused))
        failed = {url: str(error) for url, error in self.failed.items()}
        return TransferResult(size, time.perf_counter() - started, failed, refused)

    def abort(self) -> None:
        """Called by :meth:`WeightUpdate.abort`, whose ``aborted`` is done then."""
        for receiver in self.receivers.values():
            receiver.abort()

    def _buckets(self, weights: NamedWeights) -> Iterator[Bucket]:
        for bucket in buckets(weights, self.update.bucket_bytes, self.update.dtype):
            if bucket.flat.is_cuda:
                self.state.gpu = bucket.flat.device
            if self.update.fill is not None:
                bucket.flat.fill_(self.update.fill)
            yield bucket

    def _deliver_to_all(self, threads: DaemonPool, bucket: Bucket, version: str | None) -> Calls:
        prepared = self.prepare(bucket) if self.receivers else bucket
        receivers = [receiver for url, receiver in self.receivers.items() if url not in self.failed]
        if not receivers or self.update.aborted.done():
            return {receiver.url: self.update.aborted for receiver in receivers}
        return self.start(threads, receivers, prepared, version)

    def _end_all(self, threads: DaemonPool) -> None:
        """Close the open updates, also after an error but not after an abort: a server with an open update refuses the next."""
        if not self.update.aborted.done():
            self._wait({url: threads.submit(self.receivers[url].end) for url in self._begun})

    def _wait(self, calls: Calls) -> None:
        """Wait until all calls have returned or the transfer is aborted, and note which have failed."""
        aborted = self.update.aborted
        for future in calls.values():
            wait([future, aborted], return_when=FIRST_COMPLETED)
        for url, future in calls.items():
            error = InterruptedError("aborted") if aborted.done() else future.exception()
            if error is not None:
                self.failed.setdefault(url, error)
        calls.clear()


class IpcSender(ServerSender[WeightReceiver]):
    """Weights inside the requests: as handles of GPU memory (CUDA IPC) to a server on the same GPU, otherwise by value.

    Receivers serialize a bucket on a GPU as handles, so it stays alive until all servers have answered.
    """

    def send(self, weights: NamedWeights) -> TransferResult:
        result = super().send(weights)
        self._collect(None)  # the server has answered: every rank may free its last bucket
        return result

    def prepare(self, bucket: Bucket) -> Bucket:
        bucket = bucket.to(CPU) if self.update.by_value else self.to_gpu_of_receivers(bucket)
        if self.update.beside:
            [receiver] = self.receivers.values()
            assert isinstance(receiver, PartsReceiver)
            try:
                part = receiver.part(bucket)
            except Exception as error:  # the other ranks wait for this one
                part = RuntimeError(f"{type(error).__name__}: {error}")
            self._parts = self._collect(part)
            self._alive = bucket  # in place of the last one, which the server has taken by now
        return bucket

    def deliver(self, receiver: WeightReceiver, bucket: Bucket, version: str | None) -> None:
        if not self.update.beside:
            super().deliver(receiver, bucket, version)
        elif self._parts:  # this rank is the first one
            assert isinstance(receiver, PartsReceiver)
            for part in self._parts:
                if isinstance(part, RuntimeError):
                    raise part
            self.begin(receiver)
            receiver.receive_parts(self._parts, version)

    def _collect(self, part: Any) -> list[Any]:
        """The parts of all ranks beside the server, on the first, once the server has answered for the bucket before."""
        if not self.update.beside:
            return []
        assert self.state.collect is not None
        return self.state.collect(part, self.update.beside)
