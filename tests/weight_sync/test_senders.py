"""Each way of sending weights, against receivers in this process; and transfers that are aborted."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from vlmrl.config import SGLang
from vlmrl.engine.base import EngineError
from vlmrl.utils.threads import DaemonPool
from vlmrl.weight_sync import SENDERS, base, nccl
from vlmrl.weight_sync.base import Bucket, TransferResult, WeightsRefused, WeightUpdate
from vlmrl.weight_sync.local import LocalSender
from vlmrl.weight_sync.server_sync import WeightSync

PATIENCE = 60  # seconds, for what takes milliseconds


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


@dataclass
class GroupMember(FakeReceiver):
    """Joins a gloo group as rank 1. Where it ``hangs``, it takes part in no broadcast."""

    group: dist.ProcessGroup | None = None

    def join_group(self, group: nccl.GroupAddress) -> None:
        limit = timedelta(seconds=PATIENCE)
        store = dist.TCPStore(group.host, group.port, group.size, False, limit)
        for prefix in (group.name, f"{group.name}/", "cpu/"):  # as torch names those of its own groups
            store = dist.PrefixStore(prefix, store)
        self.group = dist.ProcessGroupGloo(store, 1, group.size, limit)
        self.calls.append("join")

    def receive_broadcast(self, bucket: Bucket, version: str | None, group: str) -> None:
        empty = Bucket(bucket.names, bucket.shapes, torch.zeros_like(bucket.flat))
        if not self.hangs:
            self.group.broadcast([empty.flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        self.receive(empty, version)


@dataclass
class FolderReader(FakeReceiver):
    def load_folder(self, folder, version: str) -> None:
        for path in sorted(folder.iterdir()):
            self.weights |= load_file(path)
        self.calls.append(version)


def update_of(sender: str, *receivers, **changes) -> WeightUpdate:
    return WeightUpdate(receivers, SENDERS[sender], "v1", "run", **({"bucket_bytes": 8} | changes))


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """Two buckets of 8 bytes."""
    return [("a", torch.full((2,), value)), ("b", torch.full((1, 2), -value))]


def test_a_bucket_at_a_time_and_the_last_one_names_the_weights():
    receiver = FakeReceiver("one")
    result = update_of("tensor", receiver).send(iter(weights(3.0)))
    assert receiver.calls == ["begin", None, "v1", "end"]
    assert {name: weight.tolist() for name, weight in receiver.weights.items()} == {"a": [3, 3], "b": [[-3, -3]]}
    assert (result.bytes, result.failed) == (16, {})


def test_a_process_group_lives_as_long_as_the_run_and_is_made_again_for_a_resend():
    receiver = GroupMember("http://127.0.0.1:1")
    update = update_of("group", receiver)
    assert not update.send(iter(weights(3.0))).failed
    assert receiver.weights["b"].tolist() == [[-3, -3]]
    assert not update.send(iter(weights(4.0))).failed
    assert receiver.calls == ["join", *["begin", None, "v1", "end"] * 2]
    fresh = GroupMember("http://127.0.0.1:1")
    assert not update_of("group", fresh, resend=True).send(()).failed
    assert fresh.calls == ["join", "begin", None, "v1", "end"] and fresh.weights["a"].tolist() == [4, 4]
    update_of("group", fresh).sender(update_of("group", fresh)).abort()  # leaves no group behind
    assert not nccl._groups


def test_files_are_read_when_all_are_written_and_then_deleted(tmp_path):
    receiver = FolderReader("one")
    assert not update_of("disk", receiver, folder=tmp_path).send(iter(weights(3.0))).failed
    assert receiver.calls == ["v1"] and receiver.weights["b"].tolist() == [[-3, -3]]
    assert not list(tmp_path.iterdir())


def test_a_server_that_cannot_receive_in_this_way_is_named():
    with pytest.raises(ValueError, match=r"NcclSender needs a GroupReceiver, but one has a FakeReceiver"):
        update_of("group", FakeReceiver("one")).send(iter(weights()))


def test_a_way_that_nobody_registered_is_refused(tmp_path):
    engine = SimpleNamespace(backend=SimpleNamespace(settings=SGLang()))
    with pytest.raises(
        ValueError, match=r"sglang\.sync must be auto or one of disk, group, tensor, but it is 'pigeon'"
    ):
        WeightSync(engine, tmp_path, "pigeon")


@pytest.mark.parametrize(("way", "kind"), [("tensor", FakeReceiver), ("group", GroupMember)])
def test_an_aborted_transfer_returns_and_the_process_sends_the_next_one(way, kind):
    well, ill = kind("http://127.0.0.1:1"), kind("http://127.0.0.1:2", hangs=True)
    gathered = []

    def gather():
        for name, weight in weights():
            gathered.append(name)
            yield name, weight

    sending = DaemonPool("sending").submit(update_of(way, well, ill).send, gather())
    assert well.called.wait(PATIENCE) and ill.called.wait(PATIENCE)
    base.abort("run")
    assert set(sending.result(PATIENCE).failed) == {well.url, ill.url}
    assert gathered == ["a", "b"]  # all of them: other ranks wait for this one in each gather
    assert "end" not in well.calls + ill.calls
    assert not [key for key in nccl._groups if key[0] == "run"]
    again = kind("http://127.0.0.1:1")
    assert not update_of(way, again).send(iter(weights(5.0))).failed
    assert again.weights["a"].tolist() == [5, 5]
    sender = update_of(way, again)
    sender.sender(sender).abort()


def test_an_abort_between_two_buckets_sends_no_more():
    receiver = FakeReceiver("one")

    def gather():
        for name, weight in weights():
            yield name, weight
            base.abort("run")

    assert update_of("tensor", receiver).send(gather()).failed == {"one": "aborted"}
    assert receiver.calls == []


def test_a_transfer_is_aborted_also_where_a_receiver_never_returns():
    receiver = FakeReceiver("one", hangs=True)
    receiver.abort = lambda: None
    sending = DaemonPool("sending").submit(update_of("tensor", receiver).send, iter(weights()))
    assert receiver.called.wait(PATIENCE)
    base.abort("run")
    assert sending.result(PATIENCE).failed == {"one": "aborted"}
    receiver.aborted.set()  # lets its thread end


def sync_of(receiver, folder) -> WeightSync:
    """A sync of one server, whose receiver is given."""

    async def withdraw(server): ...

    server = SimpleNamespace(url=receiver.url, failed=lambda *began: None, log_tail=lambda: ", says its log")
    servers = SimpleNamespace(update_lock=asyncio.Lock(), ready=[server], all=[server], withdraw=withdraw)
    thread = SimpleNamespace(run=lambda coroutine: coroutine)
    backend = SimpleNamespace(receiver=lambda _: receiver, settings=SimpleNamespace(bucket_mb=1))
    engine = SimpleNamespace(servers=servers, versions={}, thread=thread, backend=backend)
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
    base.abort("run", update.id)

    def gather():
        for name, weight in weights():
            gathered.append(name)
            yield name, weight

    assert update.send(gather()).failed == {receiver.url: "aborted"}
    assert (receiver.calls, gathered) == ([], ["a", "b"])
    later = update_of("tensor", FakeReceiver("two"))
    assert not later.send(iter(weights())).failed  # only that update was aborted


def test_an_abort_of_an_update_that_waits_leaves_the_one_that_is_sent_alone():
    receiver, waiting = FakeReceiver("one"), update_of("tensor", FakeReceiver("two"))

    def gather():
        for name, weight in weights():
            base.abort("run", waiting.id)
            yield name, weight

    assert not update_of("tensor", receiver).send(gather()).failed
    assert waiting.send(iter(weights())).failed == {"two": "aborted"}


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


def test_weights_for_an_engine_in_this_process_are_copied_into_its_model():
    copied = {}
    result = LocalSender(SimpleNamespace(load_weights=copied.update)).send(iter(weights(3.0)))
    assert copied["a"].tolist() == [3, 3] and (result.bytes, result.failed) == (16, {})


def test_a_local_transfer_that_is_aborted_leaves_the_other_weights_alone():
    copied = {}
    sender = LocalSender(SimpleNamespace(load_weights=copied.update))

    def gather():
        for name, weight in weights():
            yield name, weight
            sender.abort()

    assert sender.send(gather()).failed == {"local": "aborted"}
    assert list(copied) == ["a"]
    result = sender.send(iter(weights(2.0)))  # the next update of the run
    assert (result.bytes, result.failed, copied["b"].tolist()) == (16, {}, [[-2, -2]])


def test_the_sender_of_the_docs_works_as_it_stands(monkeypatch):
    monkeypatch.setattr("vlmrl.weight_sync.SENDERS", dict(SENDERS))
    page = Path(__file__).parents[2] / "docs/cluster.md"
    names: dict[str, type] = {}
    exec(page.read_text().partition("```python\n")[2].partition("```")[0], names)
    receiver = FakeReceiver("one")
    update = replace(update_of("tensor", receiver), sender=names["SENDERS"]["checked"])
    assert not update.send(iter(weights(3.0))).failed
    assert receiver.weights["a"].tolist() == [3, 3]
    with pytest.raises(ValueError, match=r"not finite: \['a'\]"):
        update.send(iter(weights(float("nan"))))
    assert receiver.calls[-1] == "end"


def test_a_refusal_is_not_a_mere_failure():
    receiver = FakeReceiver("one")

    def refuse(bucket, version):
        raise WeightsRefused("no such weight")

    receiver.receive = refuse
    result = update_of("tensor", receiver).send(iter(weights()))
    assert (result.failed, result.refused) == ({"one": "no such weight"}, ("one",))
    assert receiver.calls == ["begin", "end"]  # the update is closed, or the server would take no other


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
    assert (tensor.calls, disk.calls) == (["begin", None, "end"], [])
    assert not list(tmp_path.iterdir())


def test_the_weights_that_are_kept_for_a_resend_are_the_last_ones_that_were_sent_to_stay():
    receiver = FakeReceiver("one")
    update = update_of("tensor", receiver)
    update.send(iter(weights(3.0)))
    replace(update, fill=0.5).send(iter(weights(4.0)))
    assert receiver.weights["a"].tolist() == [0.5, 0.5]
    replace(update, keep=False).send(iter(weights(5.0)))
    assert receiver.weights["a"].tolist() == [5, 5]
    replace(update, resend=True).send(())
    assert receiver.weights["a"].tolist() == [3, 3] and receiver.weights["b"].tolist() == [[-3, -3]]


def test_a_process_group_whose_broadcast_failed_is_made_again():
    url = "http://127.0.0.1:1"
    ill = failing(GroupMember(url), "receive_broadcast", "the server has died")
    assert update_of("group", ill).send(iter(weights())).failed == {url: "the server has died"}
    well = GroupMember(url)
    assert not update_of("group", well).send(iter(weights(2.0))).failed
    assert well.calls[0] == "join" and well.weights["a"].tolist() == [2, 2]
    update_of("group", well).sender(update_of("group", well)).abort()  # leaves no group behind


def test_a_bucket_may_be_exactly_full_and_holds_one_dtype():
    made = base.buckets([("a", torch.ones(4)), ("b", torch.ones(2)), ("c", torch.ones(1, dtype=torch.int32))], 24)
    assert [bucket.names for bucket in made] == [["a", "b"], ["c"]]
    made = base.buckets([("a", torch.ones(4)), ("b", torch.ones(1, dtype=torch.int32))], 1000)
    assert [bucket.names for bucket in made] == [["a"], ["b"]]


def test_a_first_push_that_a_server_does_not_take_ends_the_run(tmp_path):
    receiver = failing(FakeReceiver("one"), "receive", "connection reset")

    async def first():
        sync = sync_of(receiver, tmp_path)
        await sync.first(lambda update: update.send(iter(weights())))

    with pytest.raises(EngineError, match="the server one did not take the weights: connection reset, says its log"):
        asyncio.run(first())


def test_weights_are_sent_in_the_servers_dtype_and_the_result_of_a_push_is_kept(tmp_path):
    receiver = FakeReceiver("one", dtype=torch.bfloat16)

    async def push():
        sync = sync_of(receiver, tmp_path)
        await sync.push(lambda update: update.send(iter(weights(1.001))), 3)
        assert list(sync.engine.versions.values()) == [3]
        return sync.bytes, sync.seconds

    size, seconds = asyncio.run(push())
    assert size == 8 and seconds > 0
    assert receiver.weights["a"].dtype == torch.bfloat16 and receiver.weights["a"].tolist() == [1, 1]


def test_two_concurrent_transfers_sent_the_same_weights_to_other_servers():
    one = TransferResult(8, 2.0, {"a": "gone"})
    other = TransferResult(8, 3.0, {"b": "no such weight"}, ("b",))
    assert one + other == TransferResult(8, 3.0, {"a": "gone", "b": "no such weight"}, ("b",))
