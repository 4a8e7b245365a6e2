"""GPUs by name, with their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    """Bytes that CUDA reports as its total. They are less than on the data sheet, where firmware and error correction take some."""


KNOWN = {
    "l4-24gb": Gpu("l4-24gb", 22.0 * GIB),
    "a10-24gb": Gpu("a10-24gb", 22.0 * GIB),
    "4090-24gb": Gpu("4090-24gb", 23.5 * GIB),
    "5090-32gb": Gpu("5090-32gb", 31.3 * GIB),
    "a100-40gb": Gpu("a100-40gb", 39.4 * GIB),
    "l40s-48gb": Gpu("l40s-48gb", 44.4 * GIB),
    "6000ada-48gb": Gpu("6000ada-48gb", 47.0 * GIB),
    "a100-80gb": Gpu("a100-80gb", 79.1 * GIB),
    "h100-80gb": Gpu("h100-80gb", 79.2 * GIB),
    "h200-141gb": Gpu("h200-141gb", 139.7 * GIB),
    "b200-180gb": Gpu("b200-180gb", 178.3 * GIB),
}
"""An H100's 80 GB as CUDA reports them; the other totals are what users have reported."""


def gpu_named(name: str) -> Gpu:
    """Raises ValueError for a name that is not in :data:`KNOWN`."""
    if name not in KNOWN:
        raise ValueError(f"--gpu must be one of {', '.join(KNOWN)}, but it is {name!r}.")
    return KNOWN[name]


def gpu_at_hand() -> Gpu | None:
    """The GPU of this process."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(found.name, float(found.total_memory))
