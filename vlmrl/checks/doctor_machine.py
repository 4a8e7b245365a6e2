"""The findings of `vlmrl doctor` about a machine: packages, GPUs, and space in folders.

Each check is a function of plain facts, and :func:`machine_findings` reads the facts of this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmrl.checks.tested_versions import TESTED_PACKAGES, installed_version, is_within, numbers, oldest_and_newest
from vlmrl.engine.server_environment import LIBRARY
from vlmrl.utils.machine_memory import is_in_memory, spill_folder

GIB = 2**30
REQUIRED = ("torch", "torchvision", "transformers", "tokenizers", "datasets")
OPTIONAL = (*(name for name in TESTED_PACKAGES if name not in REQUIRED), "ray", "peft")
LEAST_SHM = 1.0  # GiB; NCCL and Ray put what they send there, and Docker gives 64 MiB
DISK_INSTEAD = "Matters for server.sync group. Until then such weights are sent by disk."
LEAST_FREE = 1.0  # GiB of disk; below it a run can hardly write its model
ENOUGH_FREE = 10.0
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """The result of one check: ``Finding("disk", "warning", "2.1 GiB free in runs", "Free space, or set output_dir.")``."""

    check: str
    level: Literal["ok", "warning", "error"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.check:<12} {self.found}"
        return f"{line}\n{'':<21} -> {self.remedy}" if self.remedy else line


def machine_findings(output_dir: Path) -> Iterator[Finding]:
    """All checks that need no recipe. ``output_dir`` as in the config."""
    for name in (*REQUIRED, *OPTIONAL):
        version = installed_version(name)
        if version is not None or name in REQUIRED:
            yield check_package(name, version)
    has_driver = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    cuda, count = None, 0
    if has_driver:
        import torch  # seconds, which a machine without GPUs need not wait

        cuda, count = torch.version.cuda, torch.cuda.device_count()
    yield check_gpu(cuda, count, has_driver=has_driver, driver=_driver() if count else "")
    yield check_shm(shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0, count)
    folder = existing_folder(output_dir)
    yield check_disk(folder, shutil.disk_usage(folder).free / GIB, os.access(folder, os.W_OK))
    temporary = spill_folder()
    yield check_spill(temporary, shutil.disk_usage(temporary).free / GIB, is_in_memory(temporary))


def check_package(name: str, version: str | None) -> Finding:
    """``version``: the installed one, ``None`` if it is missing."""
    if version is None:
        return Finding(name, "error", "not installed", f"pip install {name}")
    tested = oldest_and_newest(name)
    if tested is None:
        return Finding(name, "ok", version)
    oldest, newest = tested
    if is_within(version, oldest, newest):
        return Finding(name, "ok", f"{version} (tested: {oldest} to {newest})")
    if numbers(version) < numbers(oldest):
        remedy = f"pip install '{name}>={oldest}'"
        return Finding(name, "error", f"{version} is older than {oldest}, the oldest tested version", remedy)
    remedy = f"If something breaks, pip install '{name}=={newest}.*' first."
    return Finding(name, "warning", f"{version} is newer than {newest}, the newest tested version", remedy)


def check_gpu(cuda: str | None, count: int, *, has_driver: bool, driver: str) -> Finding:
    """``cuda``: the version that torch is built with, ``None`` for a build without; ``driver``: a line about GPUs and driver."""
    if count:
        return Finding("gpu", "ok", f"{count}: {driver}")
    if has_driver and cuda is None:
        remedy = "Install torch for your CUDA version: https://pytorch.org/get-started/locally"
        return Finding("gpu", "error", "a driver is installed, but torch is built without CUDA", remedy)
    if has_driver:
        remedy = f"Update the driver to one for CUDA {cuda}, or pass the GPUs to the container; see nvidia-smi."
        return Finding("gpu", "error", f"a driver is installed, but torch (CUDA {cuda}) finds no GPU", remedy)
    return Finding("gpu", "ok", "none; runs compute on the CPU")


def check_nccl(own: str | None, servers: str | None, different: str) -> Finding:
    """The NCCL versions of the trainer and of its servers' environment; ``different``: why they do not connect, and what to do."""
    found = f"trainer {own or 'without'}, servers {servers or 'without'}"
    return (
        Finding("nccl", "warning", f"{found}: {different}", DISK_INSTEAD) if different else Finding("nccl", "ok", found)
    )


def check_nvcc(home: str | None, toolkit: str | None, can_link: bool, python: str) -> Finding:
    """``home``: the CUDA toolkit that servers find; ``toolkit``: the one among the packages of their environment."""
    if home is not None:
        return Finding("nvcc", "ok", f"{home}/bin/nvcc")
    if toolkit is None:
        found = "servers compile kernels at their start, and find no nvcc"
        remedy = f"Install the CUDA toolkit, or {python} -m pip install nvidia-cuda-nvcc; then ask again."
        return Finding("nvcc", "error", found, remedy)
    if not can_link:
        found = f"servers could not link kernels: {toolkit} has no {LIBRARY}"
        remedy = f"ln -sfn lib {toolkit}/lib64 && ln -sf libcudart.so.13 {toolkit}/lib/libcudart.so"
        return Finding("nvcc", "error", found, remedy)
    return Finding("nvcc", "ok", f"{toolkit}/bin/nvcc, as CUDA_HOME of the servers that a run starts")


def check_shm(gib: float, gpus: int) -> Finding:
    """``gib``: the size of /dev/shm."""
    found = f"/dev/shm has {gib:.2g} GiB"
    if gib < LEAST_SHM and gpus > 1:
        return Finding("shm", "error", found, "NCCL needs it between GPUs: start the container with --shm-size 16g.")
    if gib < LEAST_SHM:
        return Finding("shm", "warning", found, "Ray and servers need it: start the container with --shm-size 16g.")
    return Finding("shm", "ok", found)


def check_disk(folder: Path, free: float, writable: bool, needed: float = ENOUGH_FREE) -> Finding:
    """``free`` and ``needed`` in GiB."""
    found = f"{free:.1f} GiB free in {folder}"
    if not writable:
        return Finding("disk", "error", f"{folder} is read-only", "Set output_dir to a folder that you may write to.")
    if free < LEAST_FREE:
        return Finding("disk", "error", found, "Free space, or set output_dir to another disk.")
    if free < needed:
        remedy = f"{needed:.1f} GiB are wanted: free space, set output_dir to another disk, or lower checkpoint.keep."
        return Finding("disk", "warning", found, remedy)
    return Finding("disk", "ok", found)


def check_spill(folder: Path, free: float, in_memory: bool) -> Finding:
    """``folder`` is the one for temporary files; ``free`` in GiB."""
    if in_memory:
        remedy = "Images beyond a quarter of the memory would stay in memory: set TMPDIR to a folder on a disk."
        return Finding("spill", "warning", f"{folder} is in memory", remedy)
    found = f"{free:.1f} GiB free in {folder}, for images beyond a quarter of the memory"
    if free < LEAST_FREE:
        return Finding("spill", "warning", found, "Free space, or set TMPDIR to a folder on another disk.")
    return Finding("spill", "ok", found)


def existing_folder(path: Path) -> Path:
    """``path``, or the nearest folder around it that exists."""
    absolute = path.expanduser().absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi does not answer"
    return "; ".join(sorted(set(output.strip().splitlines())))
