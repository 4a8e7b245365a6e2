"""A model of one GPU's memory: named allocations, and an error for one that does not fit. Nothing is really allocated."""

from __future__ import annotations

from typing import Any

from testing.fake_sglang import FakeSGLang
from vlmrl.plan.phases import CONTEXT

GIB = 2**30
PARTS = {"kv_cache": ["server cache"], "weights": ["server weights"], "cuda_graph": ["server graphs"]}
"""What SGLang's tags release."""


class OutOfGpuMemory(RuntimeError):
    """An allocation does not fit into what is free."""


class GpuMemory:
    """``capacity`` bytes, of which allocations are taken by name. ``peak`` is the most that was ever taken at once."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.taken: dict[str, float] = {}
        self.peak = 0.0
        self.peak_of: dict[str, float] = {}

    @property
    def free(self) -> float:
        return self.capacity - sum(self.taken.values())

    def take(self, name: str, size: float) -> None:
        assert name not in self.taken, f"{name} is allocated twice"
        if size > self.free:
            parts = ", ".join(f"{part} {used / GIB:.1f}" for part, used in self.taken.items())
            raise OutOfGpuMemory(
                f"{name} needs {size / GIB:.1f} GiB, but {self.free / GIB:.1f} are free beside {parts}"
            )
        self.taken[name] = size
        if sum(self.taken.values()) > self.peak:
            self.peak, self.peak_of = sum(self.taken.values()), dict(self.taken)

    def give(self, *names: str) -> None:
        """Free these allocations, if they exist."""
        for name in names:
            self.taken.pop(name, None)


class GpuServer(FakeSGLang):
    """A fake SGLang server whose process takes memory of ``gpu`` as SGLang's does.

    At its start it loads ``weights`` bytes, and sizes its KV cache so that both are ``fraction`` of the memory that was free before.
    Asleep it keeps everything but the KV cache, and its weights and CUDA graphs unless it is asked to release them.
    """

    def __init__(self, gpu: GpuMemory, *, weights: float, other: float, **options: int) -> None:
        super().__init__(**options)
        self.gpu, self.weights_bytes, self.other = gpu, weights, other
        self.fraction = 0.0
        self.cache = 0.0
        self.launches = 0
        self.errors: list[OutOfGpuMemory] = []

    def launch(self, fraction: float) -> None:
        self.fraction, self.released, self.paused, self.begun = fraction, set(), False, False
        free = self.gpu.free
        self.cache = fraction * free - self.weights_bytes
        self.launches += 1
        self.gpu.take("server weights", self.weights_bytes)
        self.gpu.take("server cache", self.cache)
        self.gpu.take("server graphs", self.other - CONTEXT)
        self.gpu.take("server context", CONTEXT)

    def stop(self) -> None:
        self.gpu.give("server weights", "server cache", "server graphs", "server context")

    async def _release_memory_occupation(self, body: Any) -> object:
        self.gpu.give(*(name for tag in body["tags"] for name in PARTS[tag]))
        return await super()._release_memory_occupation(body)  # type: ignore[misc]

    async def _resume_memory_occupation(self, body: Any) -> object:
        try:
            sizes = {
                "server cache": self.cache,
                "server weights": self.weights_bytes,
                "server graphs": self.other - CONTEXT,
            }
            for name in (name for tag in body["tags"] for name in PARTS[tag]):
                self.gpu.take(name, sizes[name])
        except OutOfGpuMemory as error:  # the real server's process ends
            self.errors.append(error)
            raise
        return await super()._resume_memory_occupation(body)  # type: ignore[misc]
