"""Versions of the software, and the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import torch
from acceptance.report import NotTried, Report, gib, need_dependencies, require

SHOWN = ("torch", "torchvision", "triton", "transformers", "tokenizers", "peft", "sglang", "ray", "datasets", "numpy")


def run(report: Report) -> None:
    report.check("software", software)
    report.check("vlmrl's dependencies", need_dependencies)
    report.check("GPU", lambda: gpu(report))
    report.check("driver", driver)
    report.check("servers' environment", servers)


def software() -> str:
    found = [f"{name} {version(name) or 'not installed'}" for name in SHOWN]
    libraries = f"CUDA {torch.version.cuda or 'none'}, cuDNN {torch.backends.cudnn.version() or 'none'}"
    return f"{', '.join(found)}; torch built with {libraries}"


def gpu(report: Report) -> str:
    if report.tiny and not torch.cuda.is_available():
        raise NotTried(f"no CUDA GPU; {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads")
    require(torch.cuda.is_available(), "torch.cuda.is_available() is False: see docs/gpu.md for the install lines.")
    properties = torch.cuda.get_device_properties(0)
    available, total = torch.cuda.mem_get_info(0)
    require(torch.cuda.is_bf16_supported(), f"{properties.name} has no bfloat16.")
    return (
        f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {gib(total)}, of which {gib(available)} are free"
    )


def servers() -> str:
    """NCCL, and the compiler that servers need at their start."""
    need_dependencies()
    from vlmrl.engine.server_environment import cuda_home, environment_of, own_toolkit

    python = os.environ.get("VLMRL_SGLANG_PYTHON", sys.executable)
    own, found = environment_of(sys.executable), environment_of(python)
    home = cuda_home(os.environ) or own_toolkit(python)
    return f"NCCL {own.nccl} here, {found.nccl} in {python}; nvcc in {home or 'no folder: servers cannot compile'}"


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotTried(f"nvidia-smi: {type(error).__name__}") from None
    return "; ".join(output.strip().splitlines())


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
