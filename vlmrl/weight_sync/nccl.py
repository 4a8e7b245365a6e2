"""Weights by broadcast in a process group with each server: NCCL between GPUs, gloo between CPUs."""

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

from vlmrl.engine.server import free_ports
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.base import Bucket, WeightReceiver
from vlmrl.weight_sync.server_sender import ServerSender, to_gpu_of

T = TypeVar("T")


@dataclass(frozen=True)
class GroupAddress:
    """A process group that a server joins. Rank 0 is the trainer's process, which listens at ``host`` and ``port``."""

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
        """As :meth:`receive`, but the values of ``bucket.flat`` arrive as bytes by a broadcast in this group."""
        ...


class NcclSender(ServerSender[GroupReceiver]):
    """Broadcasts each bucket. Groups are kept for the whole run, and made again after a failure and for a resend."""

    needs = GroupReceiver

    def prepare(self, bucket: Bucket) -> Bucket:
        return to_gpu_of(self.update.receivers, bucket)

    def deliver(self, receiver: GroupReceiver, bucket: Bucket, version: str | None) -> None:
        key = self.update.run, receiver.url
        if self.update.resend and not self.has_begun(receiver):
            _drop(key)  # the server may have been restarted
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
            _drop(key)  # its members may be at different collectives
            raise

    def abort(self) -> None:
        super().abort()
        for url in self.receivers:
            _drop((self.update.run, url))


_groups: dict[tuple[str, str], tuple[str, Any]] = {}  # by run and URL: the group's name on the server, and the group


def _drop(key: tuple[str, str]) -> None:
    """Abort and forget the group. A broadcast that waits for the server raises."""
    _, group = _groups.pop(key, ("", None))
    if group is not None:
        c10d: Any = distributed_c10d
        with suppress(Exception):  # the group is not used again
            c10d._abort_process_group(group)


def join(receiver: GroupReceiver) -> tuple[str, Any]:
    """A new process group with a server: its name, and the group."""
    backend = "nccl" if receiver.device == "cuda" else "gloo"
    name = f"vlmrl-{uuid.uuid4().hex[:8]}"
    address = GroupAddress(name, address_towards(receiver.url), free_ports(1, "")[0], receiver.ranks + 1, backend)
    timeout = timedelta(seconds=receiver.timeout)
    return name, _at_once(lambda: _process_group(address, timeout), lambda: receiver.join_group(address))


def _at_once(ours: Callable[[], T], theirs: Callable[[], None]) -> T:
    """Both sides of a collective: ours in a thread, the server's here. If it fails, :func:`_drop` or a timeout ends ours."""
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
