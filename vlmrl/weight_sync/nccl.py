"""Weights by broadcast in a process group with each server: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmrl.utils.http_server import free_ports
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.base import Bucket, ServerSender, WeightReceiver, WeightsRefused

T = TypeVar("T")

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
POLL_SECONDS = 0.001
NCCL_LIMIT = timedelta(days=7)  # so that torch's own time limit never comes before ours
ABORT_SECONDS = 30.0  # for NCCL to end a communicator


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
        return self.to_gpu_of_receivers(bucket)

    def deliver(self, receiver: GroupReceiver, bucket: Bucket, version: str | None) -> None:
        groups, url = self.state.groups, receiver.url
        if self.update.resend and not self.has_begun(receiver):
            self._drop(url)  # the server may have been restarted
        if url not in groups:
            groups[url] = join(receiver)
        self.begin(receiver)
        name, group = groups[url]
        try:
            _at_once(
                lambda: _finish(group.broadcast([bucket.flat.view(torch.uint8)], dist.BroadcastOptions()), receiver),
                lambda: receiver.receive_broadcast(bucket, version, name),
            )
        except Exception as error:
            self._drop(url)  # its members may be at different collectives
            if not isinstance(error, WeightsRefused):
                receiver.abort()  # a server that hangs would cost its time limit again, to close the update
            raise

    def abort(self) -> None:
        super().abort()
        for url in self.receivers:
            self._drop(url)

    def _drop(self, url: str) -> None:
        """Abort and forget the group with a server. A broadcast that waits for the server ends."""
        _, group = self.state.groups.pop(url, ("", None))
        if group is not None:
            thread = DaemonPool("abort")
            aborted = thread.submit(distributed_c10d._abort_process_group, group)
            thread.close()
            wait([aborted], ABORT_SECONDS)  # the group is not used again, whether that has failed or hangs


_environment = threading.Lock()  # held while a group is made with environment variables of its own


def _finish(work: Any, receiver: GroupReceiver) -> None:
    """Wait until a collective is done. Raises TimeoutError after the receiver's time limit.

    ``work.wait()`` would not do: with NCCL it returns at once, and the GPU's stream, on which the trainer computes too, waits.
    """
    until = time.monotonic() + receiver.timeout
    while not work.is_completed():
        if time.monotonic() > until:
            raise TimeoutError(f"the server {receiver.url} took no part in a broadcast for {receiver.timeout:g} s")
        time.sleep(POLL_SECONDS)
    work.wait()  # raises the error of a collective that failed


def join(receiver: GroupReceiver) -> tuple[str, Any]:
    """A new process group with a server: its name, and the group."""
    backend = "nccl" if receiver.device == "cuda" else "gloo"
    name = f"vlmrl-{uuid.uuid4().hex[:8]}"
    address = GroupAddress(name, address_towards(receiver.url), free_ports(1, "")[0], receiver.ranks + 1, backend)
    timeout = timedelta(seconds=receiver.timeout)
    return name, _at_once(lambda: _process_group(address, timeout), lambda: receiver.join_group(address))


def _at_once(ours: Callable[[], T], theirs: Callable[[], None]) -> T:
    """Both sides of a collective, each in a thread. Raises the first error; dropping the group or a time limit ends the other side."""
    threads = DaemonPool("group", 2)
    mine, other = threads.submit(ours), threads.submit(theirs)
    threads.close()
    wait([mine, other], return_when=FIRST_EXCEPTION)
    for side in (other, mine):
        if side.done():
            side.result()
    return mine.result()


def _process_group(address: GroupAddress, timeout: timedelta) -> Any:
    """Rank 0 of the group. torch's public functions know only groups within the default one."""
    c10d: Any = distributed_c10d
    method = f"tcp://{address.host}:{address.port}"
    store, rank, size = next(c10d.rendezvous(method, 0, address.size, timeout=timeout))
    store.set_timeout(timeout)
    store = c10d.PrefixStore(address.name, store)
    backend = c10d.Backend(address.backend)
    limit = timeout if address.backend == "gloo" else NCCL_LIMIT
    with _without_watchdog():
        group, _ = c10d._new_process_group_helper(
            size, rank, [], backend, store, group_name=address.name, timeout=limit
        )
    return group


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Within the context, an NCCL group is made without a watchdog thread.

    The watchdog ends this process when a collective fails or exceeds the group's time limit, as it does when a server dies. These
    groups have a time limit of their own (:func:`_finish`). Groups that exist already keep their watchdogs: torch reads the variable
    when a group is made.
    """
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def address_towards(url: str) -> str:
    """This machine's address, as the server at ``url`` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname or "127.0.0.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
