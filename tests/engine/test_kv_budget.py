"""The embedded engine with little memory: requests wait, responses stay the same, and the bytes that are held stay within
the budget."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from testing.engine_drivers import until
from testing.episodes import a_task, image, sharp_model
from testing.tensor_memory import LiveBytes

from vlmrl.engine.base import EngineError, Request, SamplingParams, paused
from vlmrl.engine.hf.batch import RunningBatch
from vlmrl.engine.hf.budget import Budget
from vlmrl.engine.hf.engine import HFEngine
from vlmrl.engine.hf.kv_cache import BatchCache, GrowingLayer
from vlmrl.engine.hf.prompts import CachedPrompts
from vlmrl.engine.hf.rows import KeptRows, RequestRow
from vlmrl.engine.hf.sampling import RandomNumbers
from vlmrl.engine.lockstep import LockstepBatching
from vlmrl.model import tiny
from vlmrl.model.loading import LoadedModel
from vlmrl.multimodal.placeholders import expand
from vlmrl.types import Completion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its responses end at their limits, or at a stop string."""
    return sharp_model(tiny.build(tmp_path_factory.mktemp("tiny") / "model", "qwen3_vl"), end=-50.0)


@pytest.fixture
def engine_of(model: LoadedModel) -> Iterator[Any]:
    made = []

    def make(**options: Any) -> HFEngine:
        made.append(HFEngine(model.policy, model.renderer, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def a_request(model: LoadedModel, text: str, id: str, colors: tuple[str, ...] = (), **sampling: Any) -> Request:
    rendered = model.renderer.prompt(a_task(text, [image(color, (64, 64)) for color in colors]).prompt)
    store = model.new_store()
    assert store is not None
    options = SamplingParams(**({"max_tokens": 40, "seed": 5} | sampling))
    return Request(id, rendered.token_ids, [store.load(each) for each in rendered.images], options)


def many(model: LoadedModel) -> list[Request]:
    """Two members each of prompts of different lengths, some with images; responses of up to 40 tokens."""
    texts = ["What?", "Which one of these is it, left or right?", "The color of the square, " * 6]
    pairs = itertools.product(texts, [(), ("red",), ("blue", "green")])
    return [
        a_request(model, text, f"{number:02d}/{member}", colors, seed=10 * number + member, max_tokens=10 + 5 * member)
        for number, (text, colors) in enumerate(pairs)
        for member in range(2)
    ]


def ask(engine: Any, *requests: Request) -> list[Completion]:
    return asyncio.run(asyncio.wait_for(engine.generate_batch(requests), 900))


def same(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == pytest.approx(other.logprobs, abs=5e-5)


def go_on(request: Request, response: Completion, more: Request) -> Request:
    """The next turn of ``request``'s trajectory."""
    ids = [*request.prompt_ids, *response.token_ids, *more.prompt_ids]
    return replace(more, trajectory_id=request.trajectory_id, prompt_ids=ids, media=[*request.media, *more.media])


def worst_case(engine: HFEngine, *requests: Request) -> float:
    """Bytes that a batch of these requests reserves."""
    rows = [row_of(engine, request) for request in requests]
    return engine._resources.budget.needed(SimpleNamespace(rows=[], cache=None), rows)


def row_of(engine: HFEngine, request: Request) -> RequestRow:
    prompt = expand(request.prompt_ids, engine.policy.image_token_id, request.media)
    return RequestRow(request, Future(), prompt, RandomNumbers(request.sampling.seed))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> LiveBytes:
    """The memory of all keys and values: what the cache's own functions allocate, temporary copies included."""
    count = LiveBytes(torch.Tensor.is_floating_point)

    def counted(owner: Any, name: str) -> None:
        plain = owner.__dict__[name]
        function = plain.__func__ if isinstance(plain, classmethod) else plain

        def call(*args: Any, **options: Any) -> Any:
            # The new tokens' keys and values are the model's.
            new = args[1:3] if name == "update" else ()
            count.ignored = {tensor.untyped_storage()._cdata for tensor in new}
            with count:
                return function(*args, **options)

        monkeypatch.setattr(owner, name, classmethod(call) if isinstance(plain, classmethod) else call)

    for owner, name in [
        (GrowingLayer, "update"),
        (GrowingLayer, "join"),
        (GrowingLayer, "select"),
        (CachedPrompts, "join"),
    ]:
        counted(owner, name)
    return count


@pytest.mark.parametrize("share", [0.15, 1.0])
def test_responses_are_the_same_whatever_the_budget_and_it_is_kept(
    model: LoadedModel, engine_of: Any, held: LiveBytes, share: float, monkeypatch: pytest.MonkeyPatch
):
    requests = many(model)
    plain = engine_of(keep_kv=False)
    expected = ask(plain, *requests)
    plain.close()  # its thread may still hold the last cache
    unlimited, held.peak = held.peak, held.bytes
    assert held.bytes == 0
    whole = worst_case(engine_of(), *requests)
    engine = engine_of(kv_cache_bytes=share * whole, keep_kv=False, prefill_tokens=200)
    rows, advance = [], RunningBatch.advance

    def counted(running: RunningBatch) -> None:
        rows.append(len(running.rows))
        advance(running)

    monkeypatch.setattr(RunningBatch, "advance", counted)
    responses = ask(engine, *requests)
    assert all(same(one, other) for one, other in zip(responses, expected, strict=True))
    engine.close()
    assert held.peak <= share * whole
    assert unlimited <= whole
    assert (max(rows) < 12) == (share < 1)


def test_turns_with_kept_prefixes_stay_within_the_budget_and_drop_the_oldest(
    model: LoadedModel, engine_of: Any, held: LiveBytes
):
    first = [
        a_request(model, "What? " * (1 + seed % 6), f"{seed:02d}", ("red",), seed=100 + seed, stop=("e", "a"))
        for seed in range(18)
    ]
    more = a_request(model, "More of it.", "x")

    def play(engine: HFEngine) -> list[Completion]:
        responses = [ask(engine, request)[0] for request in first]
        turns = [go_on(request, response, more) for request, response in zip(first, responses, strict=True)]
        return [*responses, *ask(engine, *turns)]

    keeping, forgetting = engine_of(), engine_of(keep_kv=False)
    expected = play(keeping)
    play(forgetting)
    forgetting.close()
    keeping.close()
    held.peak = held.bytes
    limit = 1.7 * worst_case(keeping, first[5])
    tight = engine_of(kv_cache_bytes=limit)
    before = held.bytes
    assert all(same(one, other) for one, other in zip(play(tight), expected, strict=True))
    tight.close()
    assert held.peak - before <= limit
    assert keeping.tokens_prefilled < tight.tokens_prefilled <= forgetting.tokens_prefilled
    assert tight._resources.prefixes.nbytes <= limit


@pytest.fixture
def batch(model: LoadedModel, engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> RunningBatch:
    """A batch that the test advances. Its rows do not stop, and it counts as one of 100 layers: what is copied hardly counts."""
    monkeypatch.setattr(RunningBatch, "_stop_reason", lambda batch, row: None)
    resources = engine_of()._resources
    resources.budget.size = replace(resources.budget.size, layers=100)
    return RunningBatch(resources)


def long_row(id: str, prompt: int, response: int) -> RequestRow:
    ids = [100 + (7 * place + sum(id.encode())) % 100 for place in range(prompt)]
    return RequestRow(Request(id, ids, [], SamplingParams(max_tokens=response)), Future(), ids, RandomNumbers(0))


def play(batch: RunningBatch, rows: list[RequestRow], tokens: int) -> None:
    with torch.inference_mode():
        batch.admit(rows)
        for _ in range(tokens):
            batch.advance()


def test_a_long_prompt_beside_long_responses_is_counted_with_both(batch: RunningBatch):
    play(batch, [long_row(f"a{member}", 20, 150) for member in range(7)], 140)
    joins = long_row("b", 150, 20)
    needed = batch.resources.budget.needed(batch, [joins])
    play(batch, [joins], 9)
    assert batch.cache is not None and batch.cache.prefix_columns + batch.cache.columns >= 290
    assert 0.7 * needed <= batch.cache.nbytes <= needed


def test_turns_that_go_on_together_are_counted_with_the_longest_prompt_and_the_longest_rest(batch: RunningBatch):
    turns = []
    for id, prompt, response in (("a", 150, 10), ("b", 10, 150)):
        rows = [long_row(f"{id}{member}", prompt, 200) for member in range(8)]
        play(batch, rows, response)
        for row in rows:
            row.stop_reason = "stop"
            turns.append(long_row(row.request.trajectory_id, 0, 8))
            turns[-1].prompt_ids.extend([*row.ids, 105, 106])
        batch._finish()
    needed = batch.resources.budget.needed(batch, turns)
    play(batch, turns, 4)
    assert batch.cache is not None and batch.cache.prefix_columns + batch.cache.columns >= 300
    assert 0.4 * needed <= batch.cache.nbytes <= needed


def test_what_is_kept_of_a_trajectory_is_dropped_if_its_next_prompt_does_not_continue_it(batch: RunningBatch):
    rows = [long_row(id, 20, 30) for id in ("a", "b")]
    play(batch, rows, 3)
    for row in rows:
        row.stop_reason = "stop"
    batch._finish()
    waiting = deque([long_row("a", 19, 30), long_row("b", 20, 30)])
    waiting[1].prompt_ids.extend([*rows[1].token_ids, 105])
    prefixes, budget = batch.resources.prefixes, batch.resources.budget
    assert len(budget.admit(waiting, batch)) == 2
    assert "a" not in prefixes and "b" in prefixes


def test_the_least_recently_used_prefix_goes_first():
    prefixes = KeptRows(enabled=True)
    keys = torch.zeros(1, 1, 4, 1)
    for name in ("a", "b", "a", "c"):
        cache = BatchCache([GrowingLayer(keys.clone(), keys.clone())], torch.ones(1, 4, dtype=torch.bool))
        row = SimpleNamespace(
            prompt_ids=[1],
            token_ids=[2],
            next_position=1,
            expert_routing=[],
            abandoned=False,
            request=SimpleNamespace(trajectory_id=name, media=[]),
        )
        prefixes.put(row, cache, 0, version=0)
    assert prefixes.nbytes == 3 * 32
    assert prefixes.evict(spared=["b"]) and "a" not in prefixes
    assert prefixes.evict() and "b" not in prefixes
    assert not prefixes.evict(spared=["c"]) and prefixes.evict() and not prefixes.evict()
    assert prefixes.nbytes == 0


def test_a_request_that_can_never_fit_fails_alone_and_says_what_to_do(model: LoadedModel, engine_of: Any):
    small = [a_request(model, "What?", str(seed), seed=seed) for seed in range(3)]
    large = a_request(model, "What?", "large", max_tokens=5000)
    engine = engine_of(kv_cache_bytes=2 * worst_case(engine_of(), *small))

    async def go() -> list[Any]:
        calls = [engine.generate(request) for request in (small[0], large, *small[1:])]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 600)

    responses = asyncio.run(go())
    assert isinstance(responses[1], EngineError)
    assert str(responses[1]).startswith("trajectory large: rollout.kv_cache_gib must be at least 0.0")
    assert "a response of up to 5000, but it is 0.00" in str(responses[1])
    assert str(responses[1]).endswith(
        "Lower rollout.max_tokens or rollout.max_response_tokens, or give the engine more memory."
    )
    assert [response.stop_reason in ("stop", "length") for response in (responses[0], *responses[2:])] == [True] * 3


@pytest.mark.parametrize("broken", [1, 2])
def test_requests_fail_if_the_memory_of_the_gpu_cannot_be_read(
    model: LoadedModel, engine_of: Any, monkeypatch: pytest.MonkeyPatch, broken: int
):
    engine, calls = engine_of(), itertools.count(1)

    def total(running: RunningBatch) -> float:
        if next(calls) >= broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 1e12

    monkeypatch.setattr(engine._resources.budget, "_total", total)
    requests = [a_request(model, "What?", str(seed), seed=seed) for seed in range(3)]

    async def go() -> list[Any]:
        return await asyncio.gather(*(engine.generate(each) for each in requests), return_exceptions=True)

    responses = asyncio.run(asyncio.wait_for(go(), 600))
    assert all(isinstance(response, EngineError) and "illegal memory access" in str(response) for response in responses)
    monkeypatch.undo()
    assert ask(engine, requests[0])[0].token_ids


def test_an_idle_engine_holds_no_row_of_its_last_batch(model: LoadedModel, engine_of: Any):
    engine, made = engine_of(), []
    make = engine._row

    def recorded(request: Request) -> RequestRow:
        row = make(request)
        made.append(weakref.ref(row))
        return row

    engine._row = recorded
    ask(engine, *(a_request(model, "What?", str(seed), seed=seed, max_tokens=5 + seed) for seed in range(3)))

    async def held() -> list[RequestRow]:
        async with paused(engine):  # the last batch's call has returned
            gc.collect()
            return [row for each in made if (row := each()) is not None]

    assert len(made) == 3 and asyncio.run(held()) == []


def test_a_request_that_waits_is_not_overtaken(model: LoadedModel, engine_of: Any):
    plain = engine_of()
    small = [a_request(model, "Go.", str(seed), seed=seed, max_tokens=4) for seed in range(3)]
    large = a_request(model, "The color of the square, " * 8, "large", max_tokens=200)
    budget = Budget(model.policy, KeptRows(enabled=False), 16384, worst_case(plain, large))
    waiting = deque(row_of(plain, request) for request in (small[0], large, *small[1:]))
    first, second, *others = waiting
    running = SimpleNamespace(rows=[], cache=None)
    assert budget.admit(waiting, running) == [first]
    running.rows = [first]
    assert budget.admit(waiting, running) == []  # the small ones behind it would fit
    running.rows = []
    assert budget.admit(waiting, running) == [second]
    assert list(waiting) == others


def test_a_request_that_nobody_waits_for_any_more_takes_no_room(model: LoadedModel, engine_of: Any):
    plain = engine_of()
    rows = [row_of(plain, a_request(model, "Go.", str(seed), max_tokens=4)) for seed in range(2)]
    rows[0].abandoned = True
    budget = Budget(model.policy, KeptRows(enabled=False), 16384, worst_case(plain, rows[1].request))
    assert budget.admit(deque(rows[:1]), SimpleNamespace(rows=[rows[1]], cache=None)) == rows[:1]


def out_of_memory_at(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """Let these forwards fail. Returns the rows of each forward."""
    hidden, number, rows = model.policy.hidden, itertools.count(), []

    def fails(ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(len(ids))
        if next(number) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return hidden(ids, *args, **options)

    monkeypatch.setattr(model.policy, "hidden", fails)
    return rows


@pytest.mark.parametrize("calls", [(0,), (5,), (0, 1)])
def test_out_of_memory_splits_the_batch_and_loses_no_response(
    model: LoadedModel, engine_of: Any, monkeypatch: pytest.MonkeyPatch, calls: tuple[int, ...]
):
    requests = [
        a_request(model, "What? " * (1 + seed % 3), str(seed), ("red",), seed=seed, max_tokens=30) for seed in range(8)
    ]
    expected = ask(engine_of(), *requests)
    rows = out_of_memory_at(model, monkeypatch, *calls)
    engine = engine_of()
    responses = ask(engine, *requests)
    assert all(same(one, other) for one, other in zip(responses, expected, strict=True))
    assert max(rows[calls[-1] + 1 :]) <= 4
    monkeypatch.undo()
    again = ask(engine, *requests)  # the next batch is whole
    assert all(same(one, other) for one, other in zip(again, expected, strict=True))
    asyncio.run(until(lambda: engine._resources.budget.most_rows is None))  # once the engine is idle


def test_a_single_request_that_does_not_fit_the_gpu_fails_alone(
    model: LoadedModel, engine_of: Any, monkeypatch: pytest.MonkeyPatch
):
    requests = [a_request(model, "What?" * (1 + seed), str(seed), seed=seed) for seed in range(3)]
    lengths = {len(row_of(engine_of(), request).prompt_ids) for request in requests}
    hidden = model.policy.hidden

    def fails(ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        if ids.shape[1] >= max(lengths):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return hidden(ids, *args, **options)

    monkeypatch.setattr(model.policy, "hidden", fails)
    engine = engine_of()

    async def go() -> list[Any]:
        calls = [engine.generate(request) for request in requests]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 600)

    *well, ill = asyncio.run(go())
    assert [len(response.token_ids) > 0 for response in well] == [True, True]
    assert isinstance(ill, EngineError) and "Set rollout.kv_cache_gib" in str(ill)


def test_rows_fail_if_they_cannot_be_computed_again_after_a_weight_update(
    model: LoadedModel, engine_of: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_of()
    hidden, calls = model.policy.hidden, itertools.count()

    async def go() -> None:
        reached = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fails(*args: Any, **options: Any) -> Any:
            if engine.policy_version == 7:
                raise RuntimeError("broken")
            if next(calls) == 3:
                loop.call_soon_threadsafe(reached.set)
            return hidden(*args, **options)

        monkeypatch.setattr(model.policy, "hidden", fails)
        request = a_request(model, "What?", "a", max_tokens=20000, stop=())
        monkeypatch.setattr(engine._resources.renderer, "stop_ids", frozenset())
        waiting = asyncio.create_task(engine.generate(request))
        await reached.wait()
        async with paused(engine):
            engine.weights_changed(7)
        with pytest.raises(EngineError, match="RuntimeError: broken"):
            await asyncio.wait_for(waiting, 600)

    asyncio.run(go())


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_lockstep_batching_is_repeated_bit_by_bit_with_a_budget(model: LoadedModel, engine_of: Any, share: float):
    requests = many(model)
    limit = share * worst_case(engine_of(), *requests)

    def play() -> list[Completion]:
        lockstep = LockstepBatching(engine_of(kv_cache_bytes=limit, threads=1))

        async def go() -> list[Completion]:
            lockstep.join(len(requests))
            return await asyncio.gather(*(lockstep.generate(request) for request in reversed(requests)))

        return asyncio.run(asyncio.wait_for(go(), 900))

    first, second = play(), play()
    assert [(response.token_ids, response.logprobs) for response in first] == [
        (response.token_ids, response.logprobs) for response in second
    ]


def test_a_request_that_can_never_fit_fails_alone_in_a_lockstep_batch(model: LoadedModel, engine_of: Any):
    fits, long = a_request(model, "What?", "fits"), a_request(model, "What? " * 500, "long")
    lockstep = LockstepBatching(engine_of(kv_cache_bytes=1.1 * worst_case(engine_of(), fits)))

    async def go() -> list[Any]:
        lockstep.join(2)
        waiting = (lockstep.generate(request) for request in (long, fits))
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 600)

    failed, response = asyncio.run(go())
    assert isinstance(failed, EngineError) and "rollout.kv_cache_gib must be at least" in str(failed)
    assert same(response, ask(engine_of(), fits)[0])


def test_the_size_of_a_row_counts_attention_by_the_token_and_recurrent_states_by_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = BatchCache.extend
    for family in ("qwen3_vl", "qwen3_5"):
        recurrent = sharp_model(tiny.build(tmp_path / family, family))
        engine = HFEngine(recurrent.policy, recurrent.renderer)
        caches: list[BatchCache] = []

        def extend(cache: BatchCache, valid: torch.Tensor, keep: list[BatchCache] = caches) -> None:
            keep.append(cache)
            plain(cache, valid)

        monkeypatch.setattr(BatchCache, "extend", extend)
        ask(engine, a_request(recurrent, "What?", "a", max_tokens=3))
        engine.close()
        monkeypatch.undo()
        size, cache = engine._resources.budget.size, caches[-1]
        states = sum(layer.nbytes for layer in cache.layers if not isinstance(layer, GrowingLayer))
        columns = next(layer._buffers[0].shape[2] for layer in cache.layers if isinstance(layer, GrowingLayer))
        assert cache.nbytes - states == (columns + cache.prefix_columns) * size.token_bytes
        assert states <= size.state_bytes


def test_a_request_that_fits_only_without_its_prefix_is_computed_again(model: LoadedModel, engine_of: Any):
    first = a_request(model, "The color of the square, " * 8, "a", stop=("e", "a"))
    plain = engine_of(keep_kv=False)
    [response] = ask(plain, first)
    assert response.stop_reason == "stop"  # only then its keys and values are kept
    second = go_on(first, response, a_request(model, "More of it.", "x", max_tokens=2))
    engine = engine_of(kv_cache_bytes=1.05 * max(worst_case(plain, first), worst_case(plain, second)))
    assert same(ask(engine, first)[0], response)
    assert "a" in engine._resources.prefixes
    assert same(ask(engine, second)[0], ask(plain, second)[0])


def test_nothing_is_kept_of_a_request_that_was_cancelled_when_its_response_ended():
    """Its trajectory is released already, so that it would stay until the next weight update."""
    prefixes = KeptRows(enabled=True)
    cancelled, ended = long_row("cancelled", 4, 2), long_row("ended", 4, 2)
    cancelled.abandoned = True
    prefixes.release("cancelled")
    for row in (cancelled, ended):
        prefixes.put(row, BatchCache([], torch.ones(1, 4, dtype=torch.bool)), 0, version=0)
    assert "cancelled" not in prefixes and "ended" in prefixes
