"""Weights by broadcast in one process group of the trainer and all servers: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vlmrl.utils.http_server import free_ports
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync.base import (
    Bucket,
    Calls,
    Group,
    NamedWeights,
    ServerSender,
    TransferResult,
    WeightReceiver,
    WeightsRefused,
)

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
POLL_SECONDS = 0.001
NCCL_LIMIT = timedelta(days=7)  # so that torch's own time limit never comes before ours
ABORT_SECONDS = 30.0  # for NCCL to end a communicator, and for servers to answer that their part has failed
JOIN_SECONDS = 60.0  # for all servers to join a group


@dataclass(frozen=True)
class GroupAddress:
    """A process group that servers join. Rank 0 is the trainer's process, which listens at ``host`` and ``port``."""

    name: str
    host: str
    port: int
    first_rank: int
    """The rank of this server's first process."""
    size: int
    backend: str
    replaces: str | None = None
    """The last group that this server was asked to join."""


@runtime_checkable
class GroupReceiver(WeightReceiver, Protocol):
    """A server that can join a process group with the trainer and other servers."""

    def join_group(self, group: GroupAddress) -> None:
        """Join with ``ranks`` processes, and leave the group that it replaces. Returns when all members have joined."""
        ...

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        """As :meth:`receive`, but the values of ``bucket.flat`` arrive as bytes by a broadcast in this group."""
        ...


Outcomes = dict[str, BaseException | None]
"""Each server's error, by URL; None: it has done its part. A server without an entry takes part again."""


class NcclSender(ServerSender[GroupReceiver]):
    """Broadcasts each bucket once, to all servers. The group is kept for the whole run.

    Its members are exactly the servers that a bucket goes to: it is made again without a server that fails, and with one that has
    recovered. If a server fails during a broadcast, the others get the bucket in the next group. Before any collective, all servers
    must have answered a call, so that none waits for one that died earlier.
    """

    needs = GroupReceiver

    def send(self, weights: NamedWeights) -> TransferResult:
        if self.update.resend:
            self._drop(self.state.group)  # a server that recovers may have been restarted
        return super().send(weights)

    def prepare(self, bucket: Bucket) -> Bucket:
        return self.to_gpu_of_receivers(bucket)

    def start(self, threads: DaemonPool, receivers: list[GroupReceiver], bucket: Bucket, version: str | None) -> Calls:
        calls: Calls = {receiver.url: Future() for receiver in receivers}
        threads.submit(self._send_to, receivers, bucket, version, calls)
        return calls

    def abort(self) -> None:
        super().abort()
        self._drop(self.state.group)

    def _send_to(self, waiting: list[GroupReceiver], bucket: Bucket, version: str | None, calls: Calls) -> None:
        """Broadcast until every server has the bucket or has failed. Each turn ends the call of at least one."""
        while waiting and not self.update.aborted.done():
            try:
                outcomes = self._broadcast(waiting, bucket, version)
            except Exception as error:
                outcomes = {receiver.url: error for receiver in waiting}
            for url, failure in outcomes.items():
                if failure is None:
                    calls[url].set_result(None)
                    continue
                # Closing the update at a server that hangs would cost its time limit again.
                if not isinstance(failure, WeightsRefused):
                    self.receivers[url].abort()
                calls[url].set_exception(failure)
            waiting = [receiver for receiver in waiting if receiver.url not in outcomes]

    def _broadcast(self, receivers: list[GroupReceiver], bucket: Bucket, version: str | None) -> Outcomes:
        if failed := _failures(self._together(receivers, lambda: None, self.begin)):
            return failed
        group = self.state.group
        if group is None or group.handle is None or group.members != tuple(receiver.url for receiver in receivers):
            if failed := _failures(self._join(receivers)):
                return failed
            group = self.state.group
        assert group is not None
        name, handle, limit = group.name, group.handle, max(receiver.timeout for receiver in receivers)
        return self._together(
            receivers,
            lambda: _finish(handle.broadcast([bucket.flat.view(torch.uint8)], dist.BroadcastOptions()), limit),
            lambda receiver: receiver.receive_broadcast(bucket, version, name),
        )

    def _join(self, receivers: list[GroupReceiver]) -> Outcomes:
        """Make the group of these servers, if all of them join."""
        self._drop(self.state.group)
        name, port, size = f"vlmrl-{uuid.uuid4().hex[:8]}", free_ports(1, "")[0], 1
        backend = "nccl" if any(receiver.device == "cuda" for receiver in receivers) else "gloo"
        limit = timedelta(seconds=max(receiver.timeout for receiver in receivers))
        first_ranks: dict[str, int] = {}
        for receiver in receivers:
            first_ranks[receiver.url], size = size, size + receiver.ranks
        handles: list[Any] = []
        joined = self.state.joined.copy()

        def address_for(url: str) -> GroupAddress:
            return GroupAddress(name, address_towards(url), port, first_ranks[url], size, backend, joined.get(url))

        outcomes = self._together(
            receivers,
            lambda: handles.append(_process_group(address_for(receivers[0].url), limit)),
            lambda receiver: receiver.join_group(address_for(receiver.url)),
            more_seconds=JOIN_SECONDS,  # a server that has joined waits for the others
        )
        group = Group(name, handles[0] if handles else None, tuple(first_ranks))
        self.state.joined |= dict.fromkeys(first_ranks, name)
        if not self.update.aborted.done():
            self.state.group = group
        if _failures(outcomes) or self.update.aborted.done():
            self._drop(group)
        return outcomes

    def _together(
        self,
        receivers: list[GroupReceiver],
        ours: Callable[[], None],
        theirs: Callable[[GroupReceiver], None],
        more_seconds: float = 0.0,
    ) -> Outcomes:
        """Both sides of a collective, each in a thread. A first failure aborts the group, which ends the others.

        If a server did not answer, it is the cause: those that answered with an error take part again. If all answered, the first
        error is a refusal, and later ones are its consequences.
        """
        threads, group = DaemonPool("group", 1 + len(receivers)), self.state.group
        mine = threads.submit(ours)
        calls = {receiver.url: threads.submit(theirs, receiver) for receiver in receivers}
        threads.close()
        first, waiting = wait([mine, *calls.values()], return_when=FIRST_EXCEPTION)
        if not waiting and not any(call.exception() for call in first):
            return dict.fromkeys(calls)
        failed = mine.exception() if mine in first else None
        self._drop(group)
        wait(waiting, ABORT_SECONDS + more_seconds)
        outcomes: Outcomes = {
            url: call.exception() if call.done() else TimeoutError(f"the server {url} took no part in a broadcast")
            for url, call in calls.items()
        }
        answered = {url for url, error in outcomes.items() if isinstance(error, WeightsRefused)}
        if len(_failures(outcomes)) > len(answered):
            return {url: error for url, error in outcomes.items() if url not in answered}
        for url, call in calls.items():
            if failed is not None or (url in answered and call not in first):
                outcomes[url] = ConnectionError(f"the broadcast was aborted: {failed or outcomes[url]}")
        return outcomes

    def _drop(self, group: Group | None) -> None:
        """Abort a group. Whoever waits in one of its collectives gets an error."""
        if group is None or group.handle is None:
            return
        if self.state.group is group:
            self.state.group = replace(group, handle=None)
        thread = DaemonPool("abort")
        aborted = thread.submit(distributed_c10d._abort_process_group, group.handle)
        thread.close()
        wait([aborted], ABORT_SECONDS)  # the group is not used again, whether that has failed or hangs


def _failures(outcomes: Outcomes) -> Outcomes:
    return {url: error for url, error in outcomes.items() if error is not None}


_environment = threading.Lock()  # held while a group is made with environment variables of its own


def _finish(work: Any, seconds: float) -> None:
    """Wait until a collective is done. Raises TimeoutError after the servers' time limit.

    ``work.wait()`` would not do: with NCCL it returns at once, and the GPU's stream, on which the trainer computes too, waits.
    """
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            raise TimeoutError(f"a broadcast was not done after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    work.wait()  # raises the error of a collective that failed


def _process_group(address: GroupAddress, limit: timedelta) -> Any:
    """Rank 0 of the group. torch's public functions know only groups within the default one."""
    c10d: Any = distributed_c10d
    method, joining = f"tcp://{address.host}:{address.port}", timedelta(seconds=JOIN_SECONDS)
    store, rank, size = next(c10d.rendezvous(method, 0, address.size, timeout=joining))
    store.set_timeout(limit)
    store = c10d.PrefixStore(address.name, store)
    backend = c10d.Backend(address.backend)
    with _without_watchdog():
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            backend,
            store,
            group_name=address.name,
            timeout=limit if address.backend == "gloo" else NCCL_LIMIT,
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
