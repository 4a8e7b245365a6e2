"""The engine's number of threads: chosen from its first forwards, and its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testing.episodes import sharp_model

from vlmrl.engine.hf.cpu_threads import BLOCK, TRIALS, CpuThreads
from vlmrl.engine.hf.engine import HFEngine

FORWARDS = 2 * TRIALS * BLOCK  # more than the trials of one kind


def in_own_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a new thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def four() -> Iterator[None]:
    """Threads that start in the test compute on four threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class FakeClock:
    """A forward takes ``seconds[threads]``."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def forward(self) -> int:
        self.now += self.seconds[torch.get_num_threads()]
        return torch.get_num_threads()


@pytest.mark.parametrize(("seconds", "faster"), [({1: 2.0, 4: 3.0}, 1), ({1: 3.0, 4: 2.0}, 4)])
def test_the_faster_number_is_chosen(four: None, seconds: dict[int, float], faster: int):
    def play() -> list[int]:
        clock = FakeClock(seconds)
        threads = CpuThreads(clock=clock)
        return [threads.run("decode", 2, clock.forward) for _ in range(FORWARDS + 3)]

    used = in_own_thread(play)
    assert used[: 2 * BLOCK] == [4] * BLOCK + [1] * BLOCK
    assert used[-3:] == [faster] * 3


def test_the_first_weight_update_chooses_once_more(four: None):
    """The trainer's thread slows down forwards on several threads."""

    def play() -> list[int]:
        clock = FakeClock({1: 2.0, 4: 1.0})
        threads, used = CpuThreads(clock=clock), []
        for seconds in ({1: 2.0, 4: 1.0}, {1: 1.0, 4: 2.0}, {1: 2.0, 4: 1.0}):
            clock.seconds = seconds
            used.append([threads.run("decode", 1, clock.forward) for _ in range(FORWARDS + 1)][-1])
            threads.weights_changed()
        return used

    assert in_own_thread(play) == [4, 1, 1]


def test_an_engine_chooses_once_more_after_a_weight_update(qwen3_vl: Path):
    model = sharp_model(qwen3_vl)
    engine = HFEngine(model.policy, model.renderer)
    threads = engine._resources.threads
    assert threads is not None
    timed = [threads._seconds]
    for version in (1, 2):
        engine.weights_changed(version)
        timed.append(threads._seconds)
    engine.close()
    assert timed[0] is not timed[1]
    assert timed[1] is timed[2]


def test_decode_and_prefill_have_numbers_of_their_own(four: None):
    def play() -> tuple[int, int]:
        threads = CpuThreads()
        slow_together, fast_together = FakeClock({1: 1.0, 4: 2.0}), FakeClock({1: 2.0, 4: 1.0})
        for _ in range(FORWARDS):
            threads._clock = slow_together
            threads.run("decode", 1, slow_together.forward)
            threads._clock = fast_together
            threads.run("prefill", 1, fast_together.forward)
        return threads.run("decode", 1, torch.get_num_threads), threads.run("prefill", 1, torch.get_num_threads)

    assert in_own_thread(play) == (1, 4)


def test_a_fixed_number_is_never_changed(four: None):
    def play() -> set[int]:
        threads = CpuThreads(3)
        return {threads.run("decode", 1, torch.get_num_threads) for _ in range(FORWARDS)}

    assert in_own_thread(play) == {3}


def test_other_threads_keep_theirs(four: None):
    def play() -> tuple[int, int]:
        return CpuThreads(1).run("decode", 1, torch.get_num_threads), in_own_thread(torch.get_num_threads)

    assert in_own_thread(play) == (1, 4)
    assert torch.get_num_threads() == 4
