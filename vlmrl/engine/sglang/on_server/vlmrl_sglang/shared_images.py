"""Puts the images of SGLang's preprocess cache into memory that its schedulers map, so that no request copies earlier images.

With `--mm-preprocess-cache-size-mb` and `--trust-mm-content-hashes`, SGLang's front end decodes, resizes and processes an image
once. But for each request that shows the image it copies the result, 24 bytes a pixel, into new shared memory (`wrap_shm_features` in
`sglang/srt/managers/mm_utils.py`), so that a turn costs more with each image before it. Here the cached tensor itself lies in a file
in memory (memfd), and requests contain its path. A scheduler maps it, and reads it only if its prefix cache lacks the image. The
kernel frees the memory when the cache and the last request have dropped it, also after SIGKILL.

SGLang imports this module in its front end and, to unpickle :class:`SharedFeature`, in its schedulers. If the import fails because
SGLang's internals differ, it logs a warning and processes images in its own way.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.mm_utils import ShmPointerMMData
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from sglang.srt.runtime_context import get_serving


class QwenVLSharedImageProcessor(QwenVLImageProcessor):
    """SGLang's processor of the Qwen-VL families. What it caches is in shared memory."""

    def prepare_artifact_batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        artifacts = super().prepare_artifact_batch(*args, **kwargs)
        if not self.mm_preprocess_cache.enabled or not _by_shared_memory():
            return artifacts
        return [replace(artifact, feature=_shared(artifact.feature)) for artifact in artifacts]

    def _prepare_mm_items_for_transport(self, mm_items: list[Any]) -> list[Any]:
        for item in super()._prepare_mm_items_for_transport(mm_items):
            if isinstance(file := getattr(item.feature, "file", None), MemoryFile):
                item.feature = SharedFeature(file, item.feature, item.hash)
        return mm_items

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)
        # SGLang keeps this object until the response: the scheduler finds the files, even if the cache drops an image in the meantime.
        request_obj.shared_features = [item.feature for item in output.mm_items]
        return output

    def clear_preprocess_cache(self) -> None:
        """Weight updates call it, but what an image processor computes depends on no weights."""


class MemoryFile:
    """A file in memory. Other processes of this server open it as ``path`` as long as this object exists."""

    def __init__(self, size: int) -> None:
        number = os.memfd_create("vlmrl-image")
        self.path = f"/proc/{os.getpid()}/fd/{number}"
        self.inode = os.fstat(number).st_ino
        """Tells the file from a later one with its number."""
        weakref.finalize(self, os.close, number)
        os.posix_fallocate(number, 0, size)  # an OSError if memory is short, where a write would end the process


class SharedFeature(ShmPointerMMData):
    """The tensor in ``file``, pickled as the file's path; a scheduler that unpickles it maps the file."""

    def __init__(self, file: MemoryFile, tensor: torch.Tensor, precomputed_hash: int) -> None:
        self._file = file
        self._shm_handle = None
        self.tensor: torch.Tensor | None = None
        self.shape, self.dtype, self.precomputed_hash = tensor.shape, tensor.dtype, precomputed_hash

    def __getstate__(self) -> dict[str, Any]:
        known = {"shape": self.shape, "dtype": self.dtype, "precomputed_hash": self.precomputed_hash}
        return known | {"path": self._file.path, "inode": self._file.inode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shm_handle = None
        self.tensor = None
        self._materialization_error = ""
        self.shape, self.dtype, self.precomputed_hash = state["shape"], state["dtype"], state["precomputed_hash"]
        try:
            self.tensor = _mapped(state["path"], state["inode"], self.shape, self.dtype)
        except Exception as error:  # SGLang fails the request when it calls `materialize`, on all ranks at once
            self._materialization_error = f"{type(error).__name__}: {error}"

    def materialize(self) -> torch.Tensor:
        if self.tensor is None:
            raise RuntimeError(self._materialization_error)
        return self.tensor

    def close_and_unlink(self) -> None:
        self.tensor = None


def _by_shared_memory() -> bool:
    """Whether SGLang's front end and schedulers exchange tensors by shared memory: they are on one machine."""
    return not (mm_utils._get_is_default_transport() or get_serving().skip_tokenizer_init)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in a memory file, which lives as long as the result; ``tensor`` itself if it is on a GPU or there is no memory."""
    if not tensor.is_cpu:
        return tensor
    try:
        file = MemoryFile(tensor.nbytes)
    except OSError:
        return tensor
    copy = torch.from_file(file.path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    copy.file = file  # type: ignore[attr-defined]
    return copy


def _mapped(path: str, inode: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in a memory file of another process. Writes to it stay in this process."""
    number = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(number).st_ino != inode:
            raise FileNotFoundError(f"{path} is another file now")
        own = f"/proc/self/fd/{number}"
        return torch.from_file(own, shared=False, size=shape.numel(), dtype=dtype).view(shape)
    finally:
        os.close(number)
