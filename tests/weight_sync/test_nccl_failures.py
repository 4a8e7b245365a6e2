"""A server that dies or hangs during a broadcast by NCCL: it is left out, and the trainer's process lives.

The groups behave as torch's ProcessGroupNCCL does: a collective is asynchronous, ``wait()`` returns at once and makes the GPU's stream
wait instead, and a watchdog thread ends the process when a collective takes longer than the group's time limit. The watchdog runs
unless TORCH_NCCL_BLOCKING_WAIT is set where the group is made; then ``wait()`` blocks.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from testing.receivers import PATIENCE, FakeReceiver
from torch.distributed import distributed_c10d

from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync import SENDERS, base, nccl
from vlmrl.weight_sync.base import Bucket, IpcSender, SenderState, WeightsRefused, WeightUpdate


class Process:
    """The trainer's process: what would end it, and how often its GPU's stream had to wait for an unfinished collective."""

    def __init__(self) -> None:
        self.killed = threading.Event()
        self.stalls = 0


class Work:
    def __init__(self, group: NcclGroup) -> None:
        self.group, self.done = group, threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set() or self.group.aborted.is_set()

    def wait(self) -> bool:
        if self.is_completed():
            return True
        self.group.process.stalls += 1
        if self.group.blocking:
            assert self.done.wait(self.group.limit), "the collective has timed out"
        return True


class NcclGroup:
    """Rank 0's end. ``limit`` is the group's time limit in seconds."""

    def __init__(self, process: Process, limit: float) -> None:
        self.process, self.limit = process, limit
        self.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.aborted = threading.Event()
        self.works: list[Work] = []
        self.sent: list[torch.Tensor] = []
        self.arrived = threading.Condition()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work:
        work = Work(self)
        with self.arrived:
            self.works.append(work)
            self.sent.append(tensors[0])
            self.arrived.notify_all()
        if not self.blocking:
            threading.Thread(target=self._watch, args=(work,), daemon=True).start()
        return work

    def _watch(self, work: Work) -> None:
        until = time.monotonic() + self.limit
        while not work.is_completed():
            if time.monotonic() > until:
                self.process.killed.set()
                return
            time.sleep(0.005)

    def take(self, number: int) -> torch.Tensor:
        """The server's end: broadcast ``number`` is done when the server takes part in it."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.works) > number, PATIENCE)
        self.works[number].done.set()
        return self.sent[number]


@dataclass
class Server(FakeReceiver):
    """``behaves`` says what it does in the second bucket: take it, ``die``, ``hang`` or ``refuse``."""

    behaves: str = "well"
    state: SenderState = field(default_factory=SenderState)
    received: int = 0

    def end(self) -> None:
        if self.aborted.is_set():
            raise ConnectionAbortedError("aborted")
        super().end()

    def join_group(self, group: nccl.GroupAddress) -> None:
        self.calls.append("join")

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        self.received += 1
        if self.received == 2 and self.behaves == "die":
            raise ConnectionResetError("the process has ended")
        if self.received == 2 and self.behaves == "refuse":
            raise WeightsRefused("no such weight")
        if self.received == 2 and self.behaves == "hang":
            # Its HTTP call ends a little after the group's time limit, or when it is aborted.
            self.aborted.wait(self.timeout + 0.5)
            raise TimeoutError("timed out")
        made = self.state.groups[self.url][1]
        values = made.take(self.received - 1).view(bucket.flat.dtype)
        self.weights.update(Bucket(bucket.names, bucket.shapes, values.clone()).tensors())


@pytest.fixture
def process(monkeypatch) -> Process:
    made = Process()

    def new_group(*args, timeout, **options):
        return NcclGroup(made, timeout.total_seconds()), None

    class Store:
        def set_timeout(self, timeout) -> None: ...

    monkeypatch.setattr(distributed_c10d, "rendezvous", lambda *args, **options: iter([(Store(), 0, 2)]))
    monkeypatch.setattr(distributed_c10d, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", new_group)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda group: group.aborted.set())
    return made


def update_of(*servers: Server) -> WeightUpdate:
    return WeightUpdate(servers, SENDERS["group"], "v1", bucket_bytes=8)


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """Three buckets of 8 bytes."""
    return [(name, torch.full((2,), value)) for name in "abc"]


@pytest.mark.parametrize("behaves", ["die", "hang"])
def test_the_process_outlives_a_server_that_fails_in_a_broadcast_and_the_others_get_the_weights(process, behaves):
    state = SenderState()
    well = Server("http://127.0.0.1:1", state=state)
    ill = Server("http://127.0.0.1:2", behaves=behaves, timeout=0.2, state=state)
    result = update_of(well, ill).send(iter(weights(3.0)), state)
    assert set(result.failed) == {ill.url} and result.refused == ()
    assert {name: weight.tolist() for name, weight in well.weights.items()} == {name: [3, 3] for name in "abc"}
    assert well.calls == ["join", "begin", "end"]
    assert ill.received == 2 and "end" not in ill.calls
    assert not process.killed.wait(0.3)  # the group's time limit has passed
    assert list(state.groups) == [well.url]
    assert process.stalls == 0  # nothing waited on the GPU's stream for a collective that was not done
    assert ill.aborted.is_set()


def test_a_server_that_hangs_is_named_with_its_time_limit(process):
    ill = Server("http://127.0.0.1:2", behaves="hang", timeout=0.2)
    [error] = update_of(ill).send(iter(weights()), ill.state).failed.values()
    assert error == "the server http://127.0.0.1:2 took no part in a broadcast for 0.2 s"


def test_a_server_that_refuses_weights_closes_its_update(process):
    ill = Server("http://127.0.0.1:2", behaves="refuse")
    result = update_of(ill).send(iter(weights()), ill.state)
    assert result.refused == (ill.url,) and ill.calls[-1] == "end"


def test_an_abort_that_hangs_does_not_hold_up_the_run(process, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda group: never.wait(PATIENCE))
    ill = Server("http://127.0.0.1:2", behaves="die", timeout=5)
    sending = DaemonPool("sending").submit(update_of(ill).send, iter(weights()), ill.state)
    assert set(sending.result(PATIENCE).failed) == {ill.url}
    never.set()


@pytest.mark.parametrize("before", [None, "0"])
def test_only_these_groups_are_made_without_a_watchdog(process, monkeypatch, before):
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    server = Server("http://127.0.0.1:2")
    assert not update_of(server).send(iter(weights()), server.state).failed
    assert server.state.groups[server.url][1].blocking
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


@pytest.mark.parametrize("resend", [False, True])
def test_buckets_go_by_the_gpu_that_the_weights_were_on_whichever_thread_sends(monkeypatch, resend):
    """The current device of a new thread is GPU 0, also where the trainer is on another."""
    gpu = torch.device("cuda", 1)
    update = replace(update_of(Server("http://127.0.0.1:1", device="cuda")), resend=resend)
    monkeypatch.setattr(base, "buckets", lambda *args: iter([OnDevice(gpu)]))
    sender = IpcSender(update, SenderState(gpu=gpu if resend else None))
    [bucket] = sender._buckets(())
    assert sender.prepare(bucket).flat.device == gpu


class OnDevice:
    """A bucket on a device that does not exist here."""

    def __init__(self, device: torch.device) -> None:
        self.flat = SimpleNamespace(device=device, is_cuda=device.type == "cuda")

    def to(self, device: torch.device) -> OnDevice:
        return OnDevice(device)
