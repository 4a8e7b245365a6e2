"""What a check writes: a result for each thing that it tries. Imports nothing of vlmrl, which may not be importable."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class NotTried(Exception):
    """Why a check cannot be run here."""


class Report:
    """Writes the results of one check, a JSON line each, so that a crash loses none.

    ``check("title", function)`` passes if the function returns its numbers as text, fails if it raises, and was not tried if it
    raises NotTried.
    """

    def __init__(self, path: Path | None, tiny: bool) -> None:
        self.path = path
        self.tiny = tiny
        self.not_tried = 0
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-acceptance-"))

    def check(self, title: str, function: Callable[[], str]) -> None:
        began, result = time.perf_counter(), "pass"
        try:
            numbers = function()
        except NotTried as error:
            result, numbers = "not tried", str(error)
            self.not_tried += 1
        except Exception as error:
            traceback.print_exc()
            result, numbers = "FAIL", f"{type(error).__name__}: {error}"[:600]
        finally:
            free()
        row = {"title": title, "result": result, "numbers": numbers, "seconds": time.perf_counter() - began}
        print(row, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise NotTried("needs a CUDA GPU")


def free() -> None:
    """Free the GPU memory that the caching allocator keeps and no tensor uses."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # after a kernel failed, every call does
            torch.cuda.empty_cache()


def need(*packages: str) -> None:
    """Raise NotTried unless these distributions are installed."""
    missing = []
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise NotTried(f"not installed: {', '.join(missing)}")


def require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise AssertionError(rule)


def within(**numbers: tuple[float, float]) -> str:
    """``mean=(0.001, 0.01)`` as text, a value and its limit. Raises AssertionError if a value is above its limit or not finite."""
    text = ", ".join(
        f"{name.replace('_', ' ')} {value:.2e} (limit {limit:g})" for name, (value, limit) in numbers.items()
    )
    require(all(value <= limit for value, limit in numbers.values()), text)  # a NaN is not below any limit
    return text


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of ``wanted``, in float64 on the CPU."""
    one, other = value.detach().to(CPU, torch.float64), wanted.detach().to(CPU, torch.float64)
    return float((one - other).norm() / other.norm())


def mismatch(one: Iterable[np.ndarray], other: Iterable[Any]) -> tuple[float, float]:
    """Mean and maximum of |one - other| over all tokens, in nats."""
    distances = np.abs(np.concatenate([*one]) - np.concatenate([np.asarray(each) for each in other]))
    return float(distances.mean()), float(distances.max())


def seconds_of(step: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """The mean seconds of a call, after three that are not measured."""
    for _ in range(3):
        step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def need_dependencies() -> str:
    """Raise NotTried unless all of vlmrl's own dependencies are installed."""
    need(*dependencies())
    return "all are installed"


def dependencies() -> list[str]:
    """The names of pyproject.toml's dependencies, without extras."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [re.split(r"[\[<>=!~ ]", each)[0] for each in wanted]


def run_script(command: Sequence[str]) -> str:
    """The output of a script of this checkout, which goes to the log, too. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no output"]
    require(done.returncode == 0, f"{command[0]} ended with exit status {done.returncode}: {lines[-1][:300]}")
    return done.stdout
