"""Weights by a process group of the trainer's process and a server's: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.base import Bucket, WeightReceiver
from vlmrl.weight_sync.server_sender import ServerSender, to_gpu_of

T = TypeVar("T")


@dataclass(frozen=True)
class GroupAddress:
    """A process group that a server joins: rank 0 is the trainer's process, which listens at ``host`` and ``port``."""

    name: str
    host: str
    port: int
    size: int
    backend: str


@runtime_checkable
class GroupReceiver(WeightReceiver, Protocol):
    """A server that can join a process group with the trainer."""

    def join_group(self, group: GroupAddress) -> None:
        """Join as ranks 1 to ``ranks``. Returns when all have joined."""
        ...

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        """As :meth:`receive`, with the values of ``bucket.flat`` broadcast as bytes in the group of this name."""
        ...


class NcclSender(ServerSender[GroupReceiver]):
    """Broadcasts each bucket. A group lives as long as the run; a new one is made after a failure, and for a resend."""

    needs = GroupReceiver

    def prepare(self, bucket: Bucket) -> Bucket:
        return to_gpu_of(self.update.receivers, bucket)

    def deliver(self, receiver: GroupReceiver, bucket: Bucket, version: str | None) -> None:
        key = self.update.run, receiver.url
        if self.update.resend and not self.has_begun(receiver):
            _drop(key)  # the server may be another process than before
        if key not in _groups:
            _groups[key] = join(receiver)
        self.begin(receiver)
        name, group = _groups[key]
        try:
            _at_once(
                lambda: group.broadcast([bucket.flat.view(torch.uint8)], dist.BroadcastOptions()).wait(),
                lambda: receiver.receive_broadcast(bucket, version, name),
            )
        except Exception:
            _drop(key)  # its members may have stopped at different collectives
            raise

    def abort(self) -> None:
        super().abort()
        for url in self.receivers:
            _drop((self.update.run, url))


_groups: dict[tuple[str, str], tuple[str, Any]] = {}  # by run and server: the group's name there, and the group


def _drop(key: tuple[str, str]) -> None:
    """Abort the group: a broadcast that waits for the server raises."""
    _, group = _groups.pop(key, ("", None))
    if group is not None:
        c10d: Any = distributed_c10d
        with suppress(Exception):  # the group is of no more use, however its end goes
            c10d._abort_process_group(group)


def join(receiver: GroupReceiver) -> tuple[str, Any]:
    """A new process group with a server: its name, and the group."""
    backend = "nccl" if receiver.device == "cuda" else "gloo"
    name = f"vlmrl-{uuid.uuid4().hex[:8]}"
    address = GroupAddress(name, address_towards(receiver.url), free_port(), receiver.ranks + 1, backend)
    timeout = timedelta(seconds=receiver.timeout)
    return name, _at_once(lambda: _process_group(address, timeout), lambda: receiver.join_group(address))


def _at_once(ours: Callable[[], T], theirs: Callable[[], None]) -> T:
    """Do our part of a collective while the server does its part. Where the server fails, ours ends by a drop or its time-out."""
    thread = DaemonPool("group")
    mine = thread.submit(ours)
    thread.close()
    theirs()
    return mine.result()


def _process_group(address: GroupAddress, timeout: timedelta) -> Any:
    """Rank 0 of the group. torch's public functions know only groups within the default one."""
    c10d: Any = distributed_c10d
    method = f"tcp://{address.host}:{address.port}"
    store, rank, size = next(c10d.rendezvous(method, 0, address.size, timeout=timeout))
    store.set_timeout(timeout)
    store = c10d.PrefixStore(address.name, store)
    backend = c10d.Backend(address.backend)
    group, _ = c10d._new_process_group_helper(size, rank, [], backend, store, group_name=address.name, timeout=timeout)
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
