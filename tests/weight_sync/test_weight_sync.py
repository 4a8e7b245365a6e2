"""Servers kept at the trainer's weights, against a fake that speaks their protocol."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from testing.fake_sglang import FakeSGLang
from testing.sglang_engines import PATIENT, checked, out_of_service, send, settings_and_limits, until

from vlmrl.engine.base import EngineError, Request, SamplingParams, paused
from vlmrl.engine.server import Server
from vlmrl.engine.server_engine import ServerEngine
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.server_sync import WeightSync
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.engine.sglang.receiver import SGLangReceiver
from vlmrl.weight_sync import SENDERS
from vlmrl.weight_sync.base import SenderState, TransferResult, WeightUpdate, buckets

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
LOAD = "/load_lora_adapter_from_tensors"


class Words:
    image_token_id = None
    stop_ids = frozenset({258})


@pytest.fixture
def fakes():
    made = [FakeSGLang() for _ in range(2)]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def sync_of(tmp_path):
    """Makes a WeightSync of these servers; they serve weights `w` = [1, 2] as policy version 0."""
    engines = []

    def make(*fakes, offload_trainer=None, releases_weights=False, processes=MappingProxyType({}), **settings):
        usual = PATIENT | {"sync": "tensor"}
        config, limits = settings_and_limits(urls=tuple(fake.url for fake in fakes), **(usual | settings))
        known = [Server(fake.url, processes.get(fake.url)) for fake in fakes]
        servers = ServerPool(SGLangBackend(config), known, colocated=offload_trainer is not None, limits=limits)
        engine = ServerEngine(servers, Words(), [], None, offload_trainer or (lambda: True), releases_weights)
        engines.append(engine)
        sync = WeightSync(engine, tmp_path, config.sync)

        async def begin():
            await engine.start()
            await sync.first(send([1.0, 2.0]))
            await engine.serve()

        asyncio.run(begin())
        return sync

    yield make
    for engine in engines:
        engine.close()


def sampled(sync, name="t"):
    request = Request(name, [1, 2], [], SamplingParams(8))
    return asyncio.run(sync.engine.generate(request)).policy_versions


def test_buckets_hold_neighbours_of_one_dtype_up_to_their_size():
    weights = [
        ("a", torch.ones(2, 2)),
        ("b", torch.zeros(3)),
        ("c", torch.ones(9)),
        ("d", torch.ones(2, dtype=torch.int8)),
    ]
    made = list(buckets(iter(weights), max_bytes=30))
    assert [bucket.names for bucket in made] == [["a", "b"], ["c"], ["d"]]
    [(name, first), (_, second)] = made[0].tensors()
    assert (name, first.shape, first.sum(), second.sum()) == ("a", (2, 2), 4, 0)
    full = buckets([("a", torch.ones(4)), ("b", torch.ones(2)), ("c", torch.ones(1))], max_bytes=24)
    assert [bucket.names for bucket in full] == [["a", "b"], ["c"]]


def test_wider_weights_are_rounded_to_what_the_server_computes_in():
    weights = [("a", torch.tensor([1.001])), ("b", torch.tensor([1.5], dtype=BF16)), ("c", torch.tensor([3]))]
    made = list(buckets(iter(weights), 1000, BF16))
    assert [(bucket.names, bucket.flat.tolist()) for bucket in made] == [(["a", "b"], [1.0, 1.5]), (["c"], [3])]


def test_a_bucket_may_be_full_and_another_dtype_of_the_same_width_stays():
    halves = [("a", torch.tensor([1.0005], dtype=torch.float16)), ("b", torch.tensor([2.0], dtype=torch.float16))]
    (made,) = buckets(iter(halves), max_bytes=4, dtype=BF16)
    assert made.flat.dtype == torch.float16 and made.flat.tolist() == [
        torch.tensor(1.0005, dtype=torch.float16).item(),
        2.0,
    ]
    assert [bucket.names for bucket in buckets(iter(halves), max_bytes=3)] == [["a"], ["b"]]


def test_every_server_gets_every_update_and_reports_its_version(fakes, sync_of):
    sync = sync_of(*fakes)
    assert [fake.weights["w"].tolist() for fake in fakes] == [[1, 2]] * 2
    assert sampled(sync) == [0, 0, 0]
    result = asyncio.run(sync.push(send([3.0, 4.0]), policy_version=1))
    assert [fake.weights["w"].tolist() for fake in fakes] == [[3, 4]] * 2
    assert sampled(sync) == [1, 1, 1]
    assert (result.bytes, sync.bytes, result.failed) == (8, 8, {})
    updates = [path for path, _ in fakes[0].calls if "weight" in path]
    assert updates == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"] * 2


def test_paused_servers_release_their_kv_cache_until_the_trainer_is_offloaded(fakes, sync_of):
    released: list[list[set[str]]] = []
    sync = sync_of(*fakes, offload_trainer=lambda: not released.append([fake.released for fake in fakes]))

    async def update():
        async with paused(sync.engine):
            await sync.engine.pause()  # to pause twice is to pause once
            assert all(fake.released == {"kv_cache"} for fake in fakes)
            await sync.push(send([3.0, 4.0]), policy_version=1)

    for _ in range(2):
        asyncio.run(update())
        assert released.pop() == [{"kv_cache"}] * len(fakes)
        assert all(not fake.released and not fake.paused for fake in fakes)
        assert sampled(sync) == [1, 1, 1]


@pytest.mark.parametrize("updated", [True, False])
def test_servers_that_release_their_weights_serve_the_last_ones_whether_or_not_the_pause_had_an_update(
    fakes, sync_of, updated
):
    everything = {"kv_cache", "weights", "cuda_graph"}
    sync = sync_of(*fakes, offload_trainer=lambda: True, releases_weights=True)

    async def update():
        async with paused(sync.engine):
            assert all(fake.released == everything and fake.weights["w"].tolist() == [-1, -1] for fake in fakes)
            if updated:
                await sync.push(send([3.0, 4.0]), policy_version=1)
                assert all(fake.released == {"kv_cache"} for fake in fakes)

    for _ in range(2):
        asyncio.run(update())
        assert [fake.weights["w"].tolist() for fake in fakes] == [[3, 4] if updated else [1, 2]] * 2
        assert all(not fake.released and not fake.paused for fake in fakes)
        assert sampled(sync) == [int(updated)] * 3


class Started:
    """The process of a fake server: it is up ``delay`` seconds after a start, and its stop returns once ``may_end`` is set."""

    def __init__(self, fake: FakeSGLang) -> None:
        self.fake = fake
        self.alive = False
        self.starts = 0
        self.delay = 0.0
        self.ending = False
        self.may_end = threading.Event()
        self.may_end.set()

    def start(self) -> None:
        self.alive, self.starts = True, self.starts + 1
        self.timer = threading.Timer(self.delay, self.come_up)
        self.timer.start()
        self.fake.paused, self.fake.released, self.fake.failing = False, set(), set()

    def come_up(self) -> None:
        self.fake.sick = False

    def stop(self, graceful: bool = True) -> None:
        self.timer.cancel()
        self.alive, self.fake.sick, self.ending = False, True, True
        self.may_end.wait(600)
        self.ending = False

    def log_tail(self) -> str:
        return ""


def colocated(sync_of, fakes, **settings):
    """A sync of two servers that the run has started, on the trainer's GPU, and their processes."""
    well, ill = map(Started, fakes)
    processes = {fakes[0].url: well, fakes[1].url: ill}
    return sync_of(*fakes, offload_trainer=lambda: True, processes=processes, **settings), well, ill


def limit_starts(sync, seconds):
    """For later starts of servers."""
    sync.engine.servers.settings = replace(sync.engine.servers.settings, start_timeout=seconds)


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation"])
def test_a_server_that_releases_nothing_is_stopped_until_the_trainer_is_offloaded(fakes, sync_of, path):
    sync, well, ill = colocated(sync_of, fakes)
    fakes[1].failing = {path}

    async def update():
        async with paused(sync.engine):
            assert (well.alive, ill.alive) == (True, False)
            await checked(sync.engine, sync.engine.servers.all[1])
            assert (well.starts, ill.starts) == (1, 1)
            await sync.push(send([3.0, 4.0]), policy_version=1)
        await until(lambda: sync.engine.servers.all[1].ready)

    asyncio.run(update())
    assert (well.starts, ill.starts) == (1, 2)
    assert [fake.weights["w"].tolist() for fake in fakes] == [[3, 4]] * 2


def test_a_server_that_cannot_take_its_memory_back_is_restarted_at_once(fakes, sync_of):
    sync, well, ill = colocated(sync_of, fakes, health_every=3600.0)

    async def update():
        async with paused(sync.engine):
            fakes[1].failing = {"/resume_memory_occupation"}
        await until(lambda: sync.engine.servers.all[1].ready)

    asyncio.run(update())
    assert (well.starts, ill.starts) == (1, 2)
    assert not sync.engine.servers.all[1].asleep


@pytest.mark.parametrize("paused_when_it_dies", [False, True])
def test_a_pause_waits_for_a_server_that_is_being_started(fakes, sync_of, paused_when_it_dies):
    sync, _, ill = colocated(sync_of, fakes)
    ill.delay = 1.0

    async def update():
        if paused_when_it_dies:
            async with paused(sync.engine):
                ill.stop()
                await checked(sync.engine, sync.engine.servers.all[1])
        else:
            ill.stop()
        await until(lambda: ill.starts == 2)
        async with paused(sync.engine):
            assert ill.alive and fakes[1].released == {"kv_cache"}

    asyncio.run(update())
    assert ill.starts == 2


def test_a_server_that_fails_to_start_is_not_started_while_the_trainer_has_its_gpu(fakes, sync_of):
    sync, _, ill = colocated(sync_of, fakes)
    limit_starts(sync, 0.5)
    ill.delay = 3600.0

    async def update():
        ill.stop()
        await until(lambda: ill.starts == 3)  # the pause waits for a first start only
        async with paused(sync.engine):
            assert not ill.alive
            starts = ill.starts
            await checked(sync.engine, sync.engine.servers.all[1])
            assert not ill.alive and ill.starts == starts
            ill.delay = 0.0
            limit_starts(sync, 600.0)
        await until(lambda: sync.engine.servers.all[1].ready)

    asyncio.run(update())
    assert not sync.engine.servers.all[1].asleep


def test_a_pause_that_begins_while_a_server_is_stopped_keeps_it_stopped(fakes, sync_of):
    sync, _, ill = colocated(sync_of, fakes)
    limit_starts(sync, 0.5)
    ill.delay = 3600.0

    async def update():
        ill.stop()
        await until(lambda: ill.starts == 2)
        ill.may_end.clear()
        await until(lambda: ill.ending)  # for its next start
        pause = asyncio.create_task(sync.engine.pause())
        await until(lambda: sync.engine.servers.paused)
        starts = ill.starts
        ill.may_end.set()
        await pause
        await checked(sync.engine, sync.engine.servers.all[1])
        assert not ill.alive and ill.starts == starts

    asyncio.run(update())


def test_a_pause_that_begins_while_a_server_gets_its_weights_keeps_it_from_serving(fakes, sync_of):
    sync, _, ill = colocated(sync_of, fakes)
    attempts, may_have = [], threading.Event()

    async def resync(server):
        attempts.append(server)
        if len(attempts) == 1:
            raise EngineError("as the test said")  # so that no pause waits for the next attempt
        await asyncio.to_thread(may_have.wait, 600)

    sync.engine.servers.resync = resync

    async def update():
        ill.stop()
        await until(lambda: len(attempts) == 2)
        await sync.engine.pause()
        may_have.set()
        await checked(sync.engine, sync.engine.servers.all[1])
        assert not ill.alive and not sync.engine.servers.all[1].ready

    asyncio.run(update())


def test_a_server_that_recovers_does_not_serve_without_the_adapter(fakes, sync_of):
    sync = sync_of(*fakes)
    asyncio.run(sync.push_adapter({"a": torch.ones(2)}, {}, policy_version=1))
    assert sync.engine.adapter in fakes[1].adapters
    asyncio.run(out_of_service(sync.engine, fakes[1]))
    fakes[1].adapters, fakes[1].dropping = set(), {LOAD}
    fakes[1].sick = False
    loads = len(fakes[1].bodies_of(LOAD))
    asyncio.run(until(lambda: len(fakes[1].bodies_of(LOAD)) > loads + 1))
    assert not sync.engine.servers.all[1].ready
    fakes[1].dropping = set()
    asyncio.run(until(lambda: sync.engine.servers.all[1].ready))
    assert sync.engine.adapter in fakes[1].adapters


def test_an_adapter_goes_to_each_rank_in_the_servers_dtype_and_takes_the_place_of_the_last_one(fakes, sync_of):
    fakes[0].info |= {"tp_size": 2, "dtype": "bfloat16"}
    sync = sync_of(fakes[0])
    for version, value in enumerate((1.001, 2.0), start=1):
        asyncio.run(sync.push_adapter({"a": torch.tensor([value])}, {"r": 8}, version))
    asyncio.run(until(lambda: fakes[0].adapters == {sync.engine.adapter}))
    loads = fakes[0].bodies_of(LOAD)
    assert [(sync.engine.versions[load["lora_name"]], load["config_dict"]) for load in loads] == [
        (1, {"r": 8}),
        (2, {"r": 8}),
    ]
    parts = [pickle.loads(base64.b64decode(part)) for part in loads[0]["serialized_named_tensors"]]
    assert [(part["a"].dtype, part["a"].tolist()) for part in parts] == [(BF16, [1.0])] * 2
    assert fakes[0].weights["w"].dtype == BF16


def test_a_server_that_refuses_an_adapter_ends_the_run_and_one_that_does_not_answer_is_left_out(fakes, sync_of):
    sync = sync_of(*fakes)
    fakes[1].dropping = {LOAD}
    asyncio.run(sync.push_adapter({"a": torch.ones(2)}, {}, policy_version=1))
    assert [server.ready for server in sync.engine.servers.all] == [True, False]
    fakes[0].failing = {LOAD}
    with pytest.raises(EngineError, match="a server refused the adapter"):
        asyncio.run(sync.push_adapter({"a": torch.ones(2)}, {}, policy_version=2))


def test_a_push_waits_for_a_resync(fakes, sync_of):
    sync = sync_of(fakes[0])
    lock = sync.engine.servers.update_lock

    async def hold(push):
        for _ in range(100):
            await asyncio.sleep(0)
        lock.release()
        return fakes[0].weights["w"].tolist(), push.done()

    async def push():
        await sync.engine.thread.run(lock.acquire())  # as a resync does
        task = asyncio.create_task(sync.push(send([3.0, 4.0]), policy_version=1))
        await asyncio.sleep(0)
        before = await sync.engine.thread.run(hold(task))
        await task
        return before

    assert asyncio.run(push()) == ([1, 2], False)
    assert fakes[0].weights["w"].tolist() == [3, 4]


def test_where_the_trainer_cannot_be_offloaded_servers_stay_asleep(fakes, sync_of):
    well = [True]
    sync = sync_of(fakes[0], offload_trainer=lambda: well[0])

    async def update():
        async with paused(sync.engine):
            well[0] = False

    asyncio.run(update())
    assert fakes[0].released == {"kv_cache"} and fakes[0].paused


def test_a_server_that_was_away_gets_the_weights_before_it_serves_again(fakes, sync_of):
    sync = sync_of(*fakes)
    asyncio.run(out_of_service(sync.engine, fakes[1]))
    asyncio.run(sync.push(send([3.0, 4.0]), policy_version=1))
    assert fakes[1].weights["w"].tolist() == [1, 2]
    fakes[1].sick = False
    asyncio.run(until(lambda: sync.engine.servers.all[1].ready))
    assert fakes[1].weights["w"].tolist() == [3, 4]
    asyncio.run(out_of_service(sync.engine, fakes[0]))
    assert sampled(sync) == [1, 1, 1]


def test_a_server_that_dies_in_the_midst_of_an_update_is_left_out_until_it_is_current(fakes, sync_of):
    sync = sync_of(*fakes)
    fakes[1].dropping = {"/update_weights_from_tensor"}
    result = asyncio.run(sync.push(send([3.0, 4.0]), policy_version=1))
    assert list(result.failed) == [fakes[1].url]
    assert fakes[1].weights["w"].tolist() == [1, 2]
    assert {tuple(sampled(sync, f"t{i}")) for i in range(4)} == {(1, 1, 1)}
    fakes[1].dropping = set()
    asyncio.run(until(lambda: sync.engine.servers.all[1].ready))
    assert fakes[1].weights["w"].tolist() == [3, 4]


def test_weights_that_no_server_could_take_wait_for_the_first_that_recovers(fakes, sync_of):
    sync = sync_of(fakes[0])
    asyncio.run(out_of_service(sync.engine, fakes[0]))
    result = asyncio.run(sync.push(send([3.0, 4.0]), policy_version=1))
    assert result.failed == {} and fakes[0].weights["w"].tolist() == [1, 2]
    fakes[0].sick = False
    assert sampled(sync) == [1, 1, 1]
    assert fakes[0].weights["w"].tolist() == [3, 4]


def test_a_server_that_recovers_does_not_serve_if_a_sender_of_ones_own_has_kept_no_weights_for_it(
    fakes, sync_of, monkeypatch
):
    """It would sample from the weights it has, under the name of the last ones."""

    class KeepsNone:
        def __init__(self, update, state):
            self.update = update

        def send(self, weights):
            named = dict(weights)
            for fake in fakes:
                if fake.url in [receiver.url for receiver in self.update.receivers]:
                    fake.weights, fake.version = fake.weights | named, self.update.version
            return TransferResult(sum(weight.nbytes for weight in named.values()), 0.0)

        def abort(self):
            pass

    monkeypatch.setitem(SENDERS, "own", KeepsNone)
    sync = sync_of(*fakes, sync="own")
    asyncio.run(out_of_service(sync.engine, fakes[1]))
    trainer = send([3.0, 4.0])
    asyncio.run(sync.push(lambda update: update.send(()) if update.resend else trainer(update), policy_version=1))
    fakes[1].sick, recovered = False, sync.engine.servers.all[1]
    asyncio.run(until(lambda: recovered.ready or "sent no weights" in recovered.last_error))
    assert not recovered.ready and fakes[1].weights["w"].tolist() == [1, 2]
    assert sampled(sync) == [1, 1, 1]


def test_a_server_that_was_restarted_behind_our_back_gives_no_stale_answer(fakes, sync_of):
    sync = sync_of(fakes[0])
    fakes[0].version, fakes[0].weights = "default", {"w": torch.zeros(2)}
    assert sampled(sync) == [0, 0, 0]
    assert fakes[0].weights["w"].tolist() == [1, 2]


def test_two_runs_that_update_one_server_at_once_leave_it_with_the_weights_of_one(fakes, sync_of):
    """The second one closed the update of the first, whose server then had weights of both, under the name of the first."""
    first, second, fake = sync_of(fakes[0]), sync_of(fakes[0]), fakes[0]
    received, opened, asked, seen = fake._update_weights_from_tensor, fake._begin_weight_update, asyncio.Event(), []

    async def receive(body):
        seen.append(await received(body))
        if len(seen) == 1:
            await asyncio.wait_for(asked.wait(), 600)  # the second run has asked to begin, and was refused
        return seen[-1]

    async def begin(body):
        response = await opened(body)
        if response.status != 200:
            asyncio.get_running_loop().call_later(1.0, asked.set)
        return response

    fake._update_weights_from_tensor, fake._begin_weight_update = receive, begin

    def of_a_run(value):
        weights, state = [(f"w{number}", torch.full((4,), value)) for number in range(4)], SenderState()
        return lambda update: update.send(iter(weights), state)

    async def both():
        pushing = asyncio.create_task(first.push(of_a_run(1.0), policy_version=1))
        while not seen and not fake.begun:
            await asyncio.sleep(0.01)
        return await asyncio.gather(pushing, second.push(of_a_run(2.0), policy_version=1), return_exceptions=True)

    first.bucket_bytes = second.bucket_bytes = 16
    results = asyncio.run(both())
    assert [getattr(result, "failed", result) for result in results] == [{}, {}]
    assert {fake.weights[f"w{number}"][0].item() for number in range(4)} == {2.0}
    assert sampled(second) == [1, 1, 1]
    assert sampled(first) == [1, 1, 1]  # its weights were sent again
    assert {fake.weights[f"w{number}"][0].item() for number in range(4)} == {1.0}


def test_after_a_refused_update_servers_get_all_of_its_weights_before_they_serve(fakes, sync_of):
    """Also the server that took them. There is one copy of the weights, the last ones."""
    sync = sync_of(*fakes)
    fakes[0].refuses = True
    with pytest.raises(EngineError, match=r"refused the weights \(tensor\).*no such weight"):
        asyncio.run(sync.push(send([3.0, 4.0]), policy_version=1))
    fakes[0].refuses = False
    asyncio.run(until(lambda: all(server.ready for server in sync.engine.servers.all)))
    assert [fake.weights["w"].tolist() for fake in fakes] == [[3, 4], [3, 4]]
    assert {tuple(sampled(sync, f"t{i}")) for i in range(4)} == {(1, 1, 1)}


@pytest.mark.parametrize("broken", ["failing", "dropping"])
def test_a_server_without_checksums_is_one_error(fakes, sync_of, broken):
    sync = sync_of(fakes[0])
    setattr(fakes[0], broken, {"/weights_checker"})
    with pytest.raises(EngineError, match=rf"the server {fakes[0].url} reported no checksums of its weights: \w+: "):
        asyncio.run(sync.checksums())


def test_a_server_that_a_killed_run_has_left_paused_is_resumed(fakes, sync_of):
    """Paused, it answers no health check."""
    fakes[0].paused = True
    assert sampled(sync_of(fakes[0]))


def test_servers_are_paused_before_their_first_weights_and_never_left_so(fakes, sync_of):
    """A server that is not paused may still count a request that it has answered, and refuse the weights."""
    engine = sync_of(*fakes).engine

    async def fail():
        async with engine.asleep():
            assert all(fake.paused for fake in fakes)
            raise EngineError("refused")

    with pytest.raises(EngineError, match="refused"):
        asyncio.run(fail())
    assert not any(fake.paused for fake in fakes)


def test_a_filled_server_shows_what_no_update_reaches(fakes, sync_of):
    sync = sync_of(fakes[0])
    fakes[0].weights["frozen"] = torch.ones(2)
    fakes[0].unreachable_weights = {"frozen"}
    before = asyncio.run(sync.checksums())[fakes[0].url]
    asyncio.run(sync.fill(send([1.0, 2.0]), 0.25))
    assert fakes[0].weights["w"].tolist() == [0.25, 0.25]
    assert sync.engine.versions[fakes[0].version] == -1  # of no policy version
    filled = asyncio.run(sync.checksums())[fakes[0].url]
    assert [name for name in before if before[name] == filled[name]] == ["frozen of rank 0"]
    asyncio.run(sync.push(send([1.0, 2.0]), policy_version=0))
    assert asyncio.run(sync.checksums())[fakes[0].url] == before


def test_an_update_can_be_sent_from_another_process(fakes):
    update = WeightUpdate((SGLangReceiver(fakes[0].url),), SENDERS["tensor"], "far.0", 2**20, BF16)
    result = pickle.loads(pickle.dumps(update)).send(iter([("w", torch.tensor([1.001, 2.0]))]))
    assert result.bytes == 4
    assert fakes[0].weights["w"].tolist() == [1.0, 2.0]
    assert fakes[0].version == "far.0"


def test_two_ranks_send_at_once_and_one_of_them_again_to_a_server_on_another_gpu(fakes):
    """Without handles of its own GPU's memory: this machine has no GPU at all."""
    parts = [WeightUpdate((SGLangReceiver(fake.url),), SENDERS["tensor"], "ranks.0", 2**20) for fake in fakes]
    weights, kept = [("w", torch.tensor([1.0, 2.0]))], SenderState()
    fakes[1].refuses = True
    other = replace(parts[1], keep=False).send(iter([("w", torch.tensor([3.0, 4.0]))]))
    result = parts[0].send(iter(weights), kept) + other
    assert (result.bytes, list(result.failed), result.refused) == (8, [fakes[1].url], (fakes[1].url,))
    fakes[1].refuses = False
    on_gpu = SGLangReceiver(fakes[1].url, device="cuda")
    assert not replace(parts[1], receivers=(on_gpu,), resend=True, by_value=True).send((), kept).failed
    assert fakes[1].weights["w"].tolist() == [1, 2]  # the kept weights
