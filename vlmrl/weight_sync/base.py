"""Weight updates: how the trainer's weights get to the engine.

    update = WeightUpdate(receivers=(receiver,), sender=SENDERS["tensor"], version="run.3", run="run", bucket_bytes=2**29)
    result = update.send(trainer.named_weights())

A :class:`WeightSender` sends named weights from the process that holds them; each way of sending has a file here and a line in
:data:`vlmrl.weight_sync.SENDERS`. A :class:`WeightReceiver` is one server's end, made by its backend.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

NamedWeights = Iterable[tuple[str, torch.Tensor]]


class WeightsRefused(Exception):
    """A server answered a weight update with an error."""


@dataclass
class Bucket:
    """Some weights of one dtype: ``flat`` ``[sum of sizes]`` holds them one after the other, each with a name and a shape."""

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
    """Weights in their order, each bucket of one dtype and at most ``max_bytes``; a larger weight is a bucket of its own.

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
    """Sends named weights to servers, to Ray's engine actors, or to an engine in this process."""

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


@dataclass(frozen=True)
class WeightUpdate:
    """One update of servers' weights: all that a sender needs. It must pickle, since the weights may be in another process."""

    receivers: tuple[WeightReceiver, ...]
    """If empty, the weights are only kept for a resend."""
    sender: Callable[[WeightUpdate], WeightSender]
    """The way of sending: a value of :data:`vlmrl.weight_sync.SENDERS`."""
    version: str
    """The servers' name for these weights."""
    run: str
    """Id of the run. The kept weights and open process groups of a process belong to a run."""
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

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the transfer. Its parts, which several processes send, share it."""

    def send(self, weights: NamedWeights) -> TransferResult:
        """Send from this process. :func:`abort` stops it from another thread."""
        running = self.id, self.sender(self)
        with _lock:
            _running[self.run] = running
            aborted = self.id in _aborted
            _aborted.discard(self.id)
        try:
            if aborted:
                running[1].abort()
            return running[1].send(weights)
        finally:
            with _lock:
                if _running.get(self.run) is running:
                    del _running[self.run]


_lock = threading.Lock()
_running: dict[str, tuple[str, WeightSender]] = {}  # by run: the update's id, and its sender
_aborted: set[str] = set()  # ids of updates that were aborted before they began


def abort(run: str, update_id: str | None = None) -> None:
    """Abort the update of ``run`` that this process sends, if there is one.

    With ``update_id``: abort this update alone. If it has not begun, its :meth:`WeightUpdate.send` will send nothing.
    """
    with _lock:
        running, sender = _running.get(run, (None, None))
        if update_id not in (None, running):
            sender = None
            _aborted.add(str(update_id))
    if sender is not None:
        sender.abort()
