"""Chooses the embedded engine's CPU threads: one or all, whichever is faster.

A decode step of a small model is many short operations. In each of them, waiting for a second thread may take longer than it saves.
It depends on model, batch and machine, so the first forwards are timed, and again after the first weight update: the trainer's thread
then has helpers of its own, and where there are more threads than cores, waking them takes longer. Results differ between the two by
float32 rounding.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

TRIALS = 6  # timed forwards with each number of threads
BLOCK = 3  # forwards before the number changes; the first one starts the threads and does not count


class CpuThreads:
    """Runs decode steps and prefills, each on the number of threads that is faster for them.

    ``count`` fixes the number. ``clock`` returns seconds. Use it from one thread: others keep their numbers, except
    one that starts at the moment of a change, which may begin with this one's.
    """

    def __init__(self, count: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._all = torch.get_num_threads()
        self._clock = clock
        self._fixed = count or (1 if self._all == 1 else None)
        self._trained = False
        self._begin()

    def _begin(self) -> None:
        self._chosen = dict.fromkeys(("decode", "prefill"), self._fixed)
        self._done = Counter[str]()  # forwards by kind
        self._seconds: dict[str, dict[int, list[float]]] = {kind: {self._all: [], 1: []} for kind in self._chosen}

    def weights_changed(self) -> None:
        """At the first call, begin to time forwards again. No forward may run meanwhile."""
        if not self._trained:
            self._trained = True
            self._begin()

    def run(self, kind: str, tokens: int, forward: Callable[[], T]) -> T:
        """``forward()`` of so many ``tokens``; ``kind`` is decode or prefill."""
        trials, chosen = self._seconds[kind], self._chosen[kind]
        count = chosen or list(trials)[self._done[kind] // BLOCK % 2]
        _set_own_threads(count, self._all)
        began = self._clock()
        result = forward()
        if chosen is None:
            if self._done[kind] % BLOCK:
                trials[count].append((self._clock() - began) / tokens)
            self._done[kind] += 1
            if min(map(len, trials.values())) == TRIALS:
                self._chosen[kind] = min(trials, key=lambda each: statistics.median(trials[each]))
        return result


def _set_own_threads(count: int, others: int) -> None:
    """The calling thread computes on ``count`` threads from now on, and threads that start later on ``others``.

    torch keeps a number for each thread, but the last one set is also what new threads begin with.
    """
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
        restore = threading.Thread(target=torch.set_num_threads, args=(others,))
        restore.start()
        restore.join()
