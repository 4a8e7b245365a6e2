"""An SGLang server on the trainer's GPU: the startup parity check, weights by CUDA IPC, sleep and wake around two steps."""

from __future__ import annotations

import importlib.metadata
import os
import threading
from dataclasses import replace

import torch
from acceptance.geometry import trained
from acceptance.mismatch import MEAN
from acceptance.models import random_folder
from acceptance.report import NotTried, Report, gib, need_dependencies, within

PYTHON = "VLMRL_SGLANG_PYTHON"


def run(report: Report) -> None:
    report.check("two colocated steps", lambda: colocated(report))


def colocated(report: Report) -> str:
    """Startup checks the parity of checksums and logprobs, and raises if they differ."""
    need_dependencies()
    report.need_gpu()
    python = os.environ.get(PYTHON)
    if python is None:
        try:
            importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            raise NotTried(
                f"sglang is not installed, and {PYTHON} does not name the Python of an environment that has it"
            ) from None
    from acceptance import geometry_recipe

    config = geometry_recipe.config()
    config = replace(
        config,
        name="sglang",
        output_dir=str(report.scratch),
        engine="sglang",
        model=replace(config.model, path=f"random:{random_folder(report)}", dtype="bfloat16"),
        server=replace(config.server, python=python, sync="tensor"),
        train=replace(config.train, steps=2),
    )
    with FreeMemory() as memory:
        rows = trained(config)
    last = rows[-1]
    return (
        f"weights: {gib(last['weight_sync/bytes'])} in {last['weight_sync/seconds']:.1f} s; rollout {last['time/rollout']:.1f} s, "
        f"update {last['time/train']:.1f} s; free GPU memory between {gib(memory.least)} and {gib(memory.most)}; restarts "
        f"{last['engine/restarts']:.0f}; " + within(mismatch=(max(row["logprob_mismatch/mean"] for row in rows), MEAN))
    )


class FreeMemory:
    """The least and the most free memory of the GPU, over all processes, while the context lasts."""

    def __enter__(self) -> FreeMemory:
        self.least, self.most = float("inf"), 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            available = torch.cuda.mem_get_info(0)[0]
            self.least, self.most = min(self.least, available), max(self.most, available)
