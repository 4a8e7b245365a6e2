"""A server's end of weight updates in this process, which notes its calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from vlmrl.weight_sync.base import Bucket

PATIENCE = 600  # seconds, for what takes milliseconds


@dataclass
class FakeReceiver:
    """A server in this process. Where it ``hangs``, it answers no bucket until the transfer is aborted."""

    url: str
    hangs: bool = False
    ranks: int = 1
    device: str = "cpu"
    dtype: torch.dtype | None = None
    timeout: float = PATIENCE
    calls: list[object] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    called: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        self.calls.append("begin")

    def receive(self, bucket: Bucket, version: str | None) -> None:
        self.calls.append(version)
        self.called.set()
        if self.hangs:
            assert self.aborted.wait(PATIENCE)
            raise ConnectionAbortedError("the socket was closed")
        self.weights.update(bucket.tensors())

    def end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.aborted.set()
