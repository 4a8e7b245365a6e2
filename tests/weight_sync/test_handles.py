"""A server of several ranks beside several trainer ranks: each opens the memory of one of them. The trainer ranks are threads here."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from testing.receivers import PATIENCE, FakeReceiver

from vlmrl.train.controller import updates_by_rank
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import Bucket, SenderState, TransferResult, WeightUpdate


@dataclass
class TwoRanks(FakeReceiver):
    """A server that takes the first number of each handle's memory, which says whose it is.

    It takes its time for the first bucket: until the other rank has gathered all of its weights.
    """

    ranks: int = 2
    opened: list[list[float]] = field(default_factory=list)
    memory: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    gathered: threading.Event = field(default_factory=threading.Event)
    freed: threading.Event = field(default_factory=threading.Event)

    def part(self, bucket: Bucket) -> Any:
        if bucket.flat[0] < 0:
            raise OSError("no handle")
        self.memory.append(weakref.ref(bucket.flat, lambda _: self.freed.set()))
        return float(bucket.flat[0])

    def receive_parts(self, parts: Sequence[Any], version: str | None) -> None:
        assert self.gathered.wait(PATIENCE)
        assert self.opened or not self.freed.wait(0.2)  # the first buckets of both ranks are still there
        self.opened.append(list(parts))
        self.calls.append(version)


class Mail:
    """`Ranks.collect` between threads."""

    def __init__(self) -> None:
        self.boxes = {rank: queue.SimpleQueue() for rank in range(4)}

    def collect(self, rank: int, item: Any, ranks: Sequence[int]) -> list[Any]:
        first, *others = ranks
        if rank == first:
            items = [item, *(self.boxes[other].get(timeout=PATIENCE) for other in others)]
            for _ in others:
                self.boxes[first].put(None)
            return items
        self.boxes[rank].put(item)
        self.boxes[first].get(timeout=PATIENCE)
        return []


def send(updates: list[WeightUpdate | None], values: Sequence[float]) -> list[TransferResult]:
    """All ranks send; the weights of each are two buckets with its value."""
    mail, threads = Mail(), DaemonPool("ranks", len(updates))

    def rank(number: int, update: WeightUpdate) -> TransferResult:
        def weights():
            for name in "ab":
                yield name, torch.full((2,), values[number])
            if update.beside.index(number):
                update.receivers[0].gathered.set()

        return update.send(weights(), SenderState(collect=lambda item, ranks: mail.collect(number, item, ranks)))

    calls = [threads.submit(rank, number, update) for number, update in enumerate(updates) if update is not None]
    threads.close()
    return [call.result(PATIENCE) for call in calls]


def update_of(*servers: TwoRanks) -> WeightUpdate:
    return WeightUpdate(servers, SENDERS["tensor"], "v1", bucket_bytes=8)


BESIDE = {"http://127.0.0.1:1": (0, 1), "http://127.0.0.1:2": (2, 3)}


def test_rank_i_of_a_server_opens_the_memory_of_the_trainer_rank_beside_it():
    servers = [TwoRanks(url) for url in BESIDE]
    results = send(updates_by_rank(update_of(*servers), BESIDE, ranks=4), [0.0, 1.0, 2.0, 3.0])
    assert [server.opened for server in servers] == [[[0, 1]] * 2, [[2, 3]] * 2]
    assert [server.calls for server in servers] == [
        ["begin", None, "v1", "end"]
    ] * 2  # one call a bucket, by the first rank
    assert not any(result.failed for result in results)


def test_a_rank_without_a_handle_fails_the_server_and_holds_up_nobody():
    server = TwoRanks("http://127.0.0.1:1")
    first, other = send(updates_by_rank(update_of(server), BESIDE, ranks=2), [0.0, -1.0])
    assert (first.failed, other.failed) == ({server.url: "OSError: no handle"}, {})
    assert server.opened == []


def test_after_an_abort_the_other_rank_still_sends_all_of_its_handles():
    """An abort reaches only the process of the first rank."""
    server, begun = TwoRanks("http://127.0.0.1:1"), threading.Event()
    first, other = updates_by_rank(update_of(server), BESIDE, ranks=2)
    server.begin = begun.set
    first.abort()
    results = send(
        [first, WeightUpdate((server,), SENDERS["tensor"], "v1", 8, keep=False, beside=other.beside)], [0.0, 1.0]
    )
    assert results[0].failed == {server.url: "aborted"} and not results[1].failed
    assert len(server.memory) == 4 and not begun.is_set()


def test_a_server_that_shares_one_gpu_or_none_gets_everything_from_one_rank():
    receiver = FakeReceiver("http://127.0.0.1:1", ranks=2)
    whole = WeightUpdate((receiver,), SENDERS["tensor"], "v1", 8)
    [first, other] = updates_by_rank(whole, {receiver.url: (1,)}, ranks=2)
    assert (first.receivers, other.receivers, other.beside, other.by_value) == ((), (receiver,), (), False)
    [first, other] = updates_by_rank(whole, {receiver.url: ()}, ranks=2)
    assert (first.receivers, first.beside, first.by_value, other) == ((receiver,), (), True, None)
    [resent] = updates_by_rank(WeightUpdate((receiver,), SENDERS["tensor"], "v1", 8, resend=True), BESIDE, ranks=1)
    assert (resent.beside, resent.by_value) == ((), True)  # from the one copy, on the host
