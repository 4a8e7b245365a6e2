"""Persistent page-locked host memory for tensors that move between GPU and host repeatedly.

A copy from or to pageable memory passes through a small buffer of the driver, at a fraction of PCIe's speed, and fresh memory costs a
fault for each page. torch's own page-locked memory is rounded up to powers of two: up to twice the size of the weights.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Hashable
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

LOCKED_LEAST = 2**16  # bytes; smaller tensors stay pageable


class HostMemory:
    """Tensors in host memory by key. Each is allocated at its first use, page-locked if it is for a GPU, and then used again."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self._gpus: set[torch.device] = set()  # from which copies may be on their way

    def copy_of(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the memory of ``key``. From a GPU the copy is asynchronous: it is there after :meth:`wait`."""
        host = self._tensors.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._tensors[key] = _allocated(tensor)
        if tensor.is_cuda:
            self._gpus.add(tensor.device)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies of the GPUs' current streams."""
        while self._gpus:
            torch.cuda.current_stream(self._gpus.pop()).synchronize()

    def moved(self, key: Hashable, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``tensor`` on ``device``: itself if it is there already, else a copy; on the host, in the memory of ``key``.

        A sharded tensor keeps its mesh. The copy is asynchronous.
        """
        if isinstance(tensor, DTensor):
            local = self.moved(key, tensor.to_local().detach(), device)
            return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
        if tensor.device.type == device.type:
            return tensor
        return self.copy_of(key, tensor) if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor, in pages of its own."""
    if not tensor.is_cuda or tensor.nbytes < LOCKED_LEAST:
        return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked process must not have them: at a write after the fork, this process would get other pages than the GPU copies from.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Page-locking touches the pages one by one, on one thread: 2 s for 4 GiB beside an H100, 0.2 s for huge pages that were touched.
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    address, runtime = memory.data_ptr(), torch.cuda.cudart()
    if runtime.cudaHostRegister(address, tensor.nbytes, 0) == runtime.cudaError.success:
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return memory.view(tensor.dtype).view(tensor.shape)
