"""Inference servers: the startup parity check, and two steps with weights or adapters sent after each."""

from __future__ import annotations

import importlib.metadata
import os
import threading

import torch
from acceptance.geometry import metrics
from acceptance.mismatch import MEAN
from acceptance.models import random_folder
from acceptance.report import NotTried, Report, gib, need, need_dependencies, run_script, within

PYTHON = {"sglang": "VLMRL_SGLANG_PYTHON", "vllm": "VLMRL_VLLM_PYTHON"}
"""Environment variables with the Python of an environment that has the program."""
BESIDE = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}
SHARE = "0.3"  # of the GPU, for a server that samples while the trainer works


def two_steps(report: Report, engine: str, *options: str) -> str:
    """Two steps of the 2B, by its command line. Startup raises if logprobs or checksums differ."""
    need_dependencies()
    report.need_gpu()
    python, folder = python_of(engine), report.scratch / f"{engine}-{'-'.join(options).replace('/', '.')}"
    command = ["benchmarks/geometry_recipe.py", "--name", folder.name, "--output-dir", str(report.scratch)]
    command += ["--model.path", f"random:{random_folder(report)}", "--model.dtype", "bfloat16", "--train.steps", "2"]
    command += ["--engine", engine, *(["--server.python", python] if python else []), *options]
    with FreeMemory() as memory:
        run_script(command)
    rows = metrics(folder, steps=2)
    last = rows[-1]
    return (
        f"sent: {gib(last['weight_sync/bytes'])} in {last['weight_sync/seconds']:.1f} s; rollout {last['time/rollout']:.1f} s "
        f"({last['sampled_tokens'] / last['time/rollout']:.0f} tokens/s), update {last['time/train']:.1f} s; free GPU memory between "
        f"{gib(memory.least)} and {gib(memory.most)}; restarts {last['engine/restarts']:.0f}; "
        + within(mismatch=(max(row["logprob_mismatch/mean"] for row in rows), MEAN))
    )


def colocated(report: Report, engine: str) -> str:
    """Weights by CUDA IPC, with sleep and wake."""
    return two_steps(report, engine, "--server.sync", "tensor")


def with_adapters(report: Report, engine: str) -> str:
    """Adapters are sent instead of weights."""
    need("peft")
    return two_steps(report, engine, "--model.lora.rank", "32")


def asynchronous(report: Report, engine: str) -> str:
    """The server samples while the trainer, on the same GPU, works."""
    return two_steps(report, engine, "--train.max-staleness", "1", "--server.args", BESIDE[engine], SHARE)


def two_gpus(report: Report, engine: str) -> str:
    """Two trainer ranks (FSDP2 by NCCL), and a server of two ranks that each open the memory of the one on their GPU."""
    need_two_gpus()
    return two_steps(report, engine, "--cluster.gpus", "2", "--server.tp", "2")


def by_group(report: Report, engine: str) -> str:
    """The server has a GPU of its own, and gets the weights by NCCL."""
    need_two_gpus()
    return two_steps(report, engine, "--cluster.gpus", "2", "--cluster.colocate", "False", "--server.sync", "group")


def need_two_gpus() -> None:
    need("ray")
    if torch.cuda.device_count() < 2:
        raise NotTried("needs two GPUs")


def python_of(engine: str) -> str | None:
    """The interpreter that has the program. None: this one."""
    python = os.environ.get(PYTHON[engine])
    if python is None:
        try:
            importlib.metadata.version(engine)
        except importlib.metadata.PackageNotFoundError:
            missing = f"{engine} is not installed, and {PYTHON[engine]} does not name the Python of an environment that has it"
            raise NotTried(missing) from None
    return python


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
