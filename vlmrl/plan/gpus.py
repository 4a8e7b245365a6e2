"""GPUs by name: memory, bfloat16 arithmetic and memory bandwidth, from their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    """Bytes that CUDA reports as its total. They are less than on the data sheet, where firmware and error correction take some."""
    flops: float
    """Dense bfloat16 operations per second, with float32 accumulation and without sparsity."""
    bandwidth: float
    """Bytes per second between its memory and its cores."""
    link: float
    """Bytes per second to another GPU of the same machine, in one direction: NVLink, or PCIe where there is none."""


def _gpu(name: str, gib: float, teraflops: float, gigabytes: float, link: float) -> Gpu:
    return Gpu(name, gib * GIB, teraflops * 1e12, gigabytes * 1e9, link * 1e9)


# Arithmetic, bandwidth and links: NVIDIA's data sheets (L4; A10; L40S; RTX 6000 Ada; A100; H100 SXM; H200 SXM; DGX B200, divided by
# its 8 GPUs) and architecture whitepapers (RTX 4090: Ada; RTX 5090: Blackwell). Memory: CUDA reports 79.2 GiB of an H100's 80 GB; the
# other totals are what users have reported.
KNOWN = {
    gpu.name: gpu
    for gpu in (
        _gpu("l4-24gb", 22.0, 121, 300, 32),
        _gpu("a10-24gb", 22.0, 125, 600, 32),
        _gpu("4090-24gb", 23.5, 165, 1008, 32),
        _gpu("5090-32gb", 31.3, 209, 1792, 64),
        _gpu("a100-40gb", 39.4, 312, 1555, 300),
        _gpu("l40s-48gb", 44.4, 362, 864, 32),
        _gpu("6000ada-48gb", 47.0, 364, 960, 32),
        _gpu("a100-80gb", 79.1, 312, 2039, 300),
        _gpu("h100-80gb", 79.2, 989, 3350, 450),
        _gpu("h200-141gb", 139.7, 989, 4800, 450),
        _gpu("b200-180gb", 178.3, 2250, 8000, 900),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ValueError for a name that is not in :data:`KNOWN`."""
    if name not in KNOWN:
        raise ValueError(f"--gpu must be one of {', '.join(KNOWN)}, but it is {name!r}.")
    return KNOWN[name]


def gpu_at_hand() -> Gpu | None:
    """The GPU of this process, with the numbers of the known one that its name and memory fit, if any does."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    title, memory = found.name.lower().replace(" ", ""), float(found.total_memory)
    alike = [gpu for gpu in KNOWN.values() if gpu.name.split("-")[0] in title and abs(gpu.memory / memory - 1) < 0.1]
    known = alike[0] if alike else Gpu(found.name, memory, 0.0, 0.0, 0.0)
    return Gpu(found.name, memory, known.flops, known.bandwidth, known.link)
