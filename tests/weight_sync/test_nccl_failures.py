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
    """The trainer's process: its groups, what would end it, and how often its stream waited for an unfinished collective.

    Its clock advances only while a server hangs, so that a slow machine exceeds no time limit.
    """

    def __init__(self) -> None:
        self.groups: dict[str, NcclGroup] = {}
        self.killed = threading.Event()
        self.stalls = 0
        self.hung: NcclGroup | None = None
        """The group in which a server hangs."""
        self.seconds = 0.0

    def monotonic(self) -> float:
        if self.hung is not None and not self.hung.aborted.is_set():
            self.seconds += 1.0
        return self.seconds


class Work:
    """Done when all ``servers`` have taken part."""

    def __init__(self, group: NcclGroup, values: torch.Tensor, servers: int) -> None:
        self.group, self.values, self.waits, self.done = group, values, servers, threading.Event()

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
    """Rank 0's end. ``limit`` is the group's time limit in seconds, ``servers`` the number of its other ranks."""

    def __init__(self, process: Process, servers: int, limit: float) -> None:
        self.process, self.servers, self.limit = process, servers, limit
        self.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.aborted = threading.Event()
        self.works: list[Work] = []
        self.changed = threading.Condition()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work:
        work = Work(self, tensors[0], self.servers)
        with self.changed:
            self.works.append(work)
            self.changed.notify_all()
        if not self.blocking:
            threading.Thread(target=self._watch, args=(work,), daemon=True).start()
        return work

    def _watch(self, work: Work) -> None:
        until = self.process.monotonic() + self.limit
        while not work.is_completed():
            if self.process.monotonic() > until:
                self.process.killed.set()
                return
            time.sleep(nccl.POLL_SECONDS / 2)

    def take(self, number: int) -> torch.Tensor:
        """A server's end of broadcast ``number``: returns when all have taken part. A server answers an abort with an error."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.works) > number or self.aborted.is_set(), PATIENCE)
            if len(self.works) > number:
                work = self.works[number]
                work.waits -= 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: not work.waits or self.aborted.is_set(), PATIENCE)
                if not work.waits:
                    work.done.set()
                    return work.values
        raise WeightsRefused("NCCL: the communicator was aborted")

    def abort(self) -> None:
        with self.changed:
            self.aborted.set()
            self.changed.notify_all()


@dataclass
class Server(FakeReceiver):
    """``behaves`` says what it does in the second bucket: take it, ``die``, ``hang`` or ``refuse``."""

    behaves: str = "well"
    state: SenderState = field(default_factory=SenderState)
    process: Process = field(default_factory=Process)
    answers_after: float = 0.1
    """Seconds after the group's end that the call of a server that hangs takes to fail."""
    never: threading.Event = field(default_factory=threading.Event)
    received: int = 0
    taken: int = 0

    def end(self) -> None:
        if self.aborted.is_set():
            raise ConnectionAbortedError("aborted")
        super().end()

    def join_group(self, group: nccl.GroupAddress) -> None:
        self.taken = 0
        self.calls.append("join")

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        self.received += 1
        if self.received == 2 and self.behaves == "die":
            raise ConnectionResetError("the process has ended")
        if self.received == 2 and self.behaves == "refuse":
            raise WeightsRefused("no such weight")
        if self.received == 2 and self.behaves == "hang":
            self.process.hung = self.process.groups[group]
            self.process.hung.aborted.wait(PATIENCE)
            self.never.wait(self.answers_after)
            raise TimeoutError("timed out")
        values = self.process.groups[group].take(self.taken).view(bucket.flat.dtype)
        self.taken += 1
        self.weights.update(Bucket(bucket.names, bucket.shapes, values.clone()).tensors())


@pytest.fixture
def process(monkeypatch) -> Process:
    made = Process()
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=made.monotonic, sleep=time.sleep))

    def new_group(size, *args, group_name, timeout, **options):
        made.groups[group_name] = NcclGroup(made, size - 1, timeout.total_seconds())
        return made.groups[group_name], None

    class Store:
        def set_timeout(self, timeout) -> None: ...

    monkeypatch.setattr(
        distributed_c10d, "rendezvous", lambda method, rank, size, **options: iter([(Store(), rank, size)])
    )
    monkeypatch.setattr(distributed_c10d, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", new_group)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", NcclGroup.abort)
    return made


def update_of(*servers: Server) -> WeightUpdate:
    return WeightUpdate(servers, SENDERS["group"], "v1", bucket_bytes=8)


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """Three buckets of 8 bytes."""
    return [(name, torch.full((2,), value)) for name in "abc"]


@pytest.mark.parametrize("behaves", ["die", "hang"])
def test_the_process_outlives_a_server_that_fails_in_a_broadcast_and_the_others_get_the_weights(process, behaves):
    state = SenderState()
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    first, ill, last = (Server(url, state=state, process=process) for url in urls)
    ill.behaves = behaves
    result = update_of(first, ill, last).send(iter(weights(3.0)), state)
    assert set(result.failed) == {ill.url} and result.refused == ()
    for well in (first, last):
        assert {name: weight.tolist() for name, weight in well.weights.items()} == {name: [3, 3] for name in "abc"}
        assert well.calls == ["begin", "join", "join", "end"]
    assert ill.received == 2 and "end" not in ill.calls
    with_all, without = process.groups.values()
    assert (with_all.servers, len(with_all.works), with_all.aborted.is_set()) == (3, 2, True)
    # The bucket again, and the last.
    assert (without.servers, len(without.works), without.aborted.is_set()) == (
        2,
        2,
        False,
    )
    assert (process.seconds > PATIENCE) == (behaves == "hang")  # the group's time limit has passed
    assert not process.killed.wait(0.1)
    assert state.group.members == (first.url, last.url) and state.group.handle is without
    assert process.stalls == 0  # nothing waited on the GPU's stream for a collective that was not done
    assert ill.aborted.is_set()


def test_a_server_that_died_before_an_update_is_left_out_before_any_collective(process):
    state = SenderState()
    servers = [Server(f"http://127.0.0.1:{port}", state=state, process=process) for port in (1, 2)]
    assert not update_of(*servers).send(iter(weights(3.0)), state).failed

    def refused():
        raise ConnectionRefusedError("nobody listens")

    servers[1].begin = refused
    assert set(update_of(*servers).send(iter(weights(4.0)), state).failed) == {servers[1].url}
    assert servers[0].weights["c"].tolist() == [4, 4] and servers[1].received == 3
    both, one = process.groups.values()
    assert (both.aborted.is_set(), len(both.works), len(one.works)) == (True, 3, 3)


def test_a_server_that_does_not_join_is_left_out_and_the_others_join_a_group_without_it(process):
    state = SenderState()
    well, ill = (Server(f"http://127.0.0.1:{port}", state=state, process=process) for port in (1, 2))

    def join_group(group):
        raise ConnectionResetError("the process has ended")

    ill.join_group = join_group
    assert set(update_of(well, ill).send(iter(weights(4.0)), state).failed) == {ill.url}
    assert well.weights["c"].tolist() == [4, 4] and state.group.members == (well.url,)


def test_a_server_leaves_the_last_group_that_it_joined_also_after_a_group_without_it(process):
    """SGLang keeps every group, and the GPU memory of its communicator, until it is asked to leave it."""
    state = SenderState()
    servers = [Server(f"http://127.0.0.1:{port}", state=state, process=process) for port in (1, 2)]
    left = []
    for server in servers:
        server.join_group = lambda group, server=server: (
            left.append((server.url[-1], group.replaces)),
            Server.join_group(server, group),
        )
    both, second = update_of(*servers), replace(update_of(servers[1]), resend=True)
    for update in (both, second, both):
        assert not update.send(iter(weights()), state).failed
    first, alone, _ = process.groups
    assert sorted(left[:2]) == [("1", None), ("2", None)]
    assert left[2] == ("2", first) and sorted(left[3:]) == [("1", first), ("2", alone)]


def test_a_server_that_hangs_is_named(process, monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    ill = Server("http://127.0.0.1:2", behaves="hang", process=process, answers_after=PATIENCE)
    [error] = update_of(ill).send(iter(weights()), ill.state).failed.values()
    assert error == "the server http://127.0.0.1:2 took no part in a broadcast"
    ill.never.set()  # lets its thread end


def test_a_server_that_refuses_weights_closes_its_update_and_what_follows_at_the_others_is_no_refusal(process):
    state = SenderState()
    well, ill = (Server(f"http://127.0.0.1:{port}", state=state, process=process) for port in (1, 2))
    ill.behaves = "refuse"
    result = update_of(well, ill).send(iter(weights()), state)
    assert result.refused == (ill.url,) and result.failed[ill.url] == "no such weight" and ill.calls[-1] == "end"
    assert "aborted" in result.failed[well.url]


def test_an_abort_that_hangs_does_not_hold_up_the_run(process, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda group: never.wait(PATIENCE))
    ill = Server("http://127.0.0.1:2", behaves="die", process=process)
    sending = DaemonPool("sending").submit(update_of(ill).send, iter(weights()), ill.state)
    assert set(sending.result(PATIENCE).failed) == {ill.url}
    never.set()


@pytest.mark.parametrize("before", [None, "0"])
def test_only_these_groups_are_made_without_a_watchdog(process, monkeypatch, before):
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    server = Server("http://127.0.0.1:2", process=process)
    assert not update_of(server).send(iter(weights()), server.state).failed
    assert server.state.group.handle.blocking
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
