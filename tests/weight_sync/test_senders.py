"""Each way of sending weights, against receivers in this process; and transfers that are aborted."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from testing.receivers import PATIENCE, FakeReceiver

from vlmrl.engine.base import EngineError
from vlmrl.engine.server_sync import WeightSync
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync import SENDERS, nccl
from vlmrl.weight_sync.base import Bucket, SenderState, WeightsRefused, WeightUpdate


@dataclass
class GroupMember(FakeReceiver):
    """Joins a gloo group. Where it ``hangs``, it takes part in no broadcast."""

    group: dist.ProcessGroup | None = None
    joined: list[nccl.GroupAddress] = field(default_factory=list)

    def join_group(self, group: nccl.GroupAddress) -> None:
        limit = timedelta(seconds=PATIENCE)
        store = dist.TCPStore(group.host, group.port, group.size, False, limit)
        for prefix in (group.name, f"{group.name}/", "cpu/"):  # as torch names those of its own groups
            store = dist.PrefixStore(prefix, store)
        self.group = dist.ProcessGroupGloo(store, group.first_rank, group.size, limit)
        self.calls.append("join")
        self.joined.append(group)

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        empty = Bucket(bucket.names, bucket.shapes, torch.zeros_like(bucket.flat))
        if not self.hangs:
            try:
                self.group.broadcast([empty.flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
            except RuntimeError as error:  # what a server answers
                raise WeightsRefused(str(error)) from error
        self.receive(empty, version)


@dataclass
class FolderReader(FakeReceiver):
    def load_folder(self, folder, version: str) -> None:
        for path in sorted(folder.iterdir()):
            self.weights |= load_file(path)
        self.calls.append(version)


def update_of(sender: str, *receivers, **changes) -> WeightUpdate:
    return WeightUpdate(receivers, SENDERS[sender], "v1", **({"bucket_bytes": 8} | changes))


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """Two buckets of 8 bytes."""
    return [("a", torch.full((2,), value)), ("b", torch.full((1, 2), -value))]


def test_a_process_group_lives_as_long_as_the_run_and_is_made_again_for_a_resend():
    receiver, state = GroupMember("http://127.0.0.1:1"), SenderState()
    assert not update_of("group", receiver).send(iter(weights(3.0)), state).failed
    assert receiver.weights["b"].tolist() == [[-3, -3]]
    assert not update_of("group", receiver).send(iter(weights(4.0)), state).failed
    assert receiver.calls == ["begin", "join", None, "v1", "end", "begin", None, "v1", "end"]
    fresh = GroupMember("http://127.0.0.1:1")
    update = update_of("group", fresh, resend=True)
    assert not update.send((), state).failed
    assert fresh.calls == ["begin", "join", None, "v1", "end"] and fresh.weights["a"].tolist() == [4, 4]
    assert fresh.joined[0].replaces == receiver.joined[0].name
    assert state.group.members == (fresh.url,)
    update.abort()  # leaves no group behind
    assert state.group.handle is None


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_the_bytes_that_leave_rank_0_do_not_grow_with_the_number_of_servers(servers, monkeypatch):
    """What rank 0 hands to broadcasts, over gloo; every server has all weights."""
    sent = []
    broadcast = dist.ProcessGroup.broadcast
    counted = lambda group, tensors, options: sent.append(tensors[0].nbytes) or broadcast(group, tensors, options)  # noqa: E731
    monkeypatch.setattr(dist.ProcessGroup, "broadcast", counted)
    members, state = [GroupMember(f"http://127.0.0.1:{port}") for port in range(1, servers + 1)], SenderState()
    update = update_of("group", *members)
    result = update.send(iter(weights(3.0)), state)
    assert (sent, result.bytes, result.failed) == ([8, 8], 16, {})
    assert [member.weights["b"].tolist() for member in members] == [[[-3, -3]]] * servers
    assert [(group.first_rank, group.size) for member in members for group in member.joined] == [
        (rank, servers + 1) for rank in range(1, servers + 1)
    ]
    update.abort()


def test_servers_of_several_ranks_follow_each_other_in_the_group(monkeypatch):
    addresses = []
    monkeypatch.setattr(nccl, "_process_group", lambda address, limit: SimpleNamespace(broadcast=None))

    @dataclass
    class Large(GroupMember):
        def join_group(self, group):
            addresses.append((self.url, group.first_rank, group.size))

    members = [Large(f"http://127.0.0.1:{port}", ranks=ranks) for port, ranks in enumerate((2, 1, 4), start=1)]
    sender = SENDERS["group"](update_of("group", *members), SenderState())
    sender._join(members)
    assert sorted(addresses) == [(members[0].url, 1, 8), (members[1].url, 3, 8), (members[2].url, 4, 8)]


def test_a_recovered_server_is_in_the_next_group_and_the_others_leave_the_last_one():
    state, urls = SenderState(), [f"http://127.0.0.1:{port}" for port in (1, 2)]
    first, other = map(GroupMember, urls)
    assert not update_of("group", first).send(iter(weights(2.0)), state).failed
    update = update_of("group", first, other)
    assert not update.send(iter(weights(3.0)), state).failed
    assert first.weights["a"].tolist() == other.weights["a"].tolist() == [3, 3]
    assert [group.replaces for group in first.joined] == [None, first.joined[0].name]
    assert [group.replaces for group in other.joined] == [None]
    update.abort()


def test_files_are_read_when_all_are_written_and_then_deleted(tmp_path):
    receiver = FolderReader("one")
    assert not update_of("disk", receiver, folder=tmp_path).send(iter(weights(3.0))).failed
    assert receiver.calls == ["v1"] and receiver.weights["b"].tolist() == [[-3, -3]]
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_receive_in_this_way_is_named():
    with pytest.raises(ValueError, match=r"NcclSender needs a GroupReceiver, but one has a FakeReceiver"):
        update_of("group", FakeReceiver("one")).send(iter(weights()))


@pytest.mark.parametrize(("way", "kind"), [("tensor", FakeReceiver), ("group", GroupMember)])
def test_an_aborted_transfer_returns_and_the_process_sends_the_next_one(way, kind):
    well, ill = kind("http://127.0.0.1:1"), kind("http://127.0.0.1:2", hangs=True)
    gathered = []

    def gather():
        for name, weight in weights():
            gathered.append(name)
            yield name, weight

    update, state = update_of(way, well, ill), SenderState()
    sending = DaemonPool("sending").submit(update.send, gather(), state)
    assert well.called.wait(PATIENCE) and ill.called.wait(PATIENCE)
    update.abort()
    assert set(sending.result(PATIENCE).failed) == {well.url, ill.url}
    assert gathered == ["a", "b"]  # all of them: other ranks wait for this one in each gather
    assert "end" not in well.calls + ill.calls
    assert state.group is None or state.group.handle is None
    again = kind("http://127.0.0.1:1")
    following = update_of(way, again)
    assert not following.send(iter(weights(5.0)), state).failed
    assert again.weights["a"].tolist() == [5, 5]
    following.abort()


def test_an_abort_between_two_buckets_sends_no_more():
    receiver = FakeReceiver("one")
    update = update_of("tensor", receiver)

    def gather():
        for name, weight in weights():
            yield name, weight
            update.abort()

    assert update.send(gather()).failed == {"one": "aborted"}
    assert receiver.calls == []


def test_a_transfer_is_aborted_also_where_a_receiver_never_returns():
    receiver = FakeReceiver("one", hangs=True)
    receiver.abort = lambda: None
    update = update_of("tensor", receiver)
    sending = DaemonPool("sending").submit(update.send, iter(weights()))
    assert receiver.called.wait(PATIENCE)
    update.abort()
    assert sending.result(PATIENCE).failed == {"one": "aborted"}
    receiver.aborted.set()  # lets its thread end


def sync_of(receiver, folder) -> WeightSync:
    """A sync of one server, whose receiver is given."""

    async def drain(server): ...

    async def restored(servers): ...

    server = SimpleNamespace(url=receiver.url, failed=lambda *began: None, log_tail=lambda: ", says its log")
    servers = SimpleNamespace(update_lock=asyncio.Lock(), ready=[server], all=[server], drain=drain)
    thread = SimpleNamespace(run=lambda coroutine: coroutine)
    backend = SimpleNamespace(receiver=lambda _: receiver, settings=SimpleNamespace())
    engine = SimpleNamespace(servers=servers, versions={}, thread=thread, backend=backend, restore_weights=restored)
    return WeightSync(engine, folder, "tensor")


def test_a_cancelled_push_aborts_its_transfer(tmp_path):
    receiver = FakeReceiver("one", hangs=True)

    async def cancelled():
        sync = sync_of(receiver, tmp_path)
        push = asyncio.create_task(sync.push(lambda update: update.send(iter(weights())), 1))
        assert await asyncio.to_thread(receiver.called.wait, PATIENCE)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push

    asyncio.run(cancelled())
    assert receiver.aborted.wait(PATIENCE)


@pytest.mark.parametrize(("way", "kind"), [("tensor", FakeReceiver), ("group", GroupMember)])
def test_an_update_that_is_aborted_before_it_begins_sends_nothing(way, kind):
    receiver, gathered = kind("http://127.0.0.1:1"), []
    update = update_of(way, receiver)
    update.abort()

    def gather():
        for name, weight in weights():
            gathered.append(name)
            yield name, weight

    assert update.send(gather()).failed == {receiver.url: "aborted"}
    assert (receiver.calls, gathered) == ([], ["a", "b"])
    later = update_of("tensor", FakeReceiver("two"))
    assert not later.send(iter(weights())).failed  # only that update was aborted


def test_a_part_of_an_update_is_aborted_with_it_and_another_update_is_not():
    """A trainer rank sends a part; and an abort may come while an earlier update is still sent."""
    receiver, waiting = FakeReceiver("one"), update_of("tensor", FakeReceiver("two"))

    def gather():
        for name, weight in weights():
            waiting.abort()
            yield name, weight

    assert not update_of("tensor", receiver).send(gather()).failed
    assert replace(waiting, by_value=True).send(iter(weights())).failed == {"two": "aborted"}


def test_a_push_that_is_cancelled_before_its_transfer_begins_sends_nothing(tmp_path):
    receiver, begun, may_send, results = FakeReceiver("one"), threading.Event(), threading.Event(), []

    def send(update):
        begun.set()
        assert may_send.wait(PATIENCE)
        results.append(update.send(iter(weights())))
        return results[-1]

    async def cancelled():
        sync = sync_of(receiver, tmp_path)
        push = asyncio.create_task(sync.push(send, 1))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        may_send.set()
        assert await asyncio.to_thread(receiver.aborted.wait, PATIENCE)
        assert not (await sync.push(lambda update: update.send(iter(weights())), 2)).failed  # after the cancelled one

    asyncio.run(cancelled())
    assert results[0].failed == {"one": "aborted"}
    assert len(receiver.calls) == 3  # of the second push: begin, one bucket, end


def failing(receiver: FakeReceiver, method: str, message: str) -> FakeReceiver:
    def fail(*args):
        receiver.calls.append(f"{method} failed")
        raise ConnectionResetError(message)

    setattr(receiver, method, fail)
    return receiver


def test_a_server_that_fails_gets_no_more_buckets_and_its_first_error_is_reported():
    well, ill = FakeReceiver("well"), failing(failing(FakeReceiver("ill"), "receive", "the first"), "end", "the last")
    result = update_of("tensor", well, ill).send(iter(weights(3.0)))
    assert result.failed == {"ill": "the first"} and result.refused == ()
    assert ill.calls == ["begin", "receive failed", "end failed"]
    assert well.calls == ["begin", None, "v1", "end"]


def test_the_next_bucket_is_gathered_while_servers_take_one_and_its_memory_is_used_again():
    gathered, receiver = threading.Event(), FakeReceiver("one")
    take = receiver.receive

    def receive(bucket, version):
        assert bucket.names != ["a"] or gathered.wait(PATIENCE)
        take(bucket, version)

    def gather():
        yield from weights(3.0)
        gathered.set()  # the bucket of `a` is on its way
        yield "c", torch.ones(2)

    receiver.receive, state = receive, SenderState()
    assert not update_of("tensor", receiver).send(gather(), state).failed
    assert receiver.calls == ["begin", None, None, "v1", "end"]
    memory = [bucket.flat.data_ptr() for bucket in state.kept.buckets]
    update_of("tensor", receiver).send(gather(), state)
    assert [bucket.flat.data_ptr() for bucket in state.kept.buckets] == memory and len(memory) == 3


def test_an_update_that_did_not_open_is_not_closed():
    receiver = failing(FakeReceiver("one"), "begin", "connection refused")
    assert update_of("tensor", receiver).send(iter(weights())).failed == {"one": "connection refused"}
    assert receiver.calls == ["begin failed"]


def test_after_an_error_the_servers_updates_are_closed_and_the_files_are_deleted(tmp_path):
    tensor, disk = FakeReceiver("tensor"), FolderReader("disk")

    def gather():
        yield from [*weights(), ("c", torch.ones(2))]
        raise RuntimeError("another rank has died")

    for update in (update_of("tensor", tensor), update_of("disk", disk, folder=tmp_path)):
        with pytest.raises(RuntimeError, match="another rank has died"):
            update.send(gather())
    assert (tensor.calls, disk.calls) == (["begin", None, None, "end"], [])
    assert not list(tmp_path.iterdir())


def test_the_weights_that_are_kept_for_a_resend_are_the_last_ones_that_were_sent_to_stay():
    receiver = FakeReceiver("one")
    update, state = update_of("tensor", receiver), SenderState()
    update.send(iter(weights(3.0)), state)
    replace(update, fill=0.5).send(iter(weights(4.0)), state)
    assert receiver.weights["a"].tolist() == [0.5, 0.5]
    replace(update, keep=False).send(iter(weights(5.0)), state)
    assert receiver.weights["a"].tolist() == [5, 5]
    replace(update, resend=True).send((), state)
    assert receiver.weights["a"].tolist() == [3, 3] and receiver.weights["b"].tolist() == [[-3, -3]]


def test_a_process_group_whose_broadcast_failed_is_made_again(monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.1)  # gloo ends no broadcast
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep))  # until the test's end
    url, state = "http://127.0.0.1:1", SenderState()
    ill = failing(GroupMember(url), "receive_broadcast", "the server has died")
    assert update_of("group", ill).send(iter(weights()), state).failed == {url: "the server has died"}
    well = GroupMember(url)
    update = update_of("group", well)
    assert not update.send(iter(weights(2.0)), state).failed
    assert well.calls[:2] == ["begin", "join"] and well.weights["a"].tolist() == [2, 2]
    update.abort()  # leaves no group behind


def test_a_first_push_that_a_server_does_not_take_ends_the_run(tmp_path):
    receiver = failing(FakeReceiver("one"), "receive", "connection reset")

    async def first():
        sync = sync_of(receiver, tmp_path)
        await sync.first(lambda update: update.send(iter(weights())))

    with pytest.raises(EngineError, match="the server one did not take the weights: connection reset, says its log"):
        asyncio.run(first())
