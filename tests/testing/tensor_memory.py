"""The bytes of tensors, counted as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make within the context, as long as they live. ``peak`` is the most at once.

    ``counted`` chooses the tensors; storages whose key is in ``ignored`` do not count.
    """

    def __init__(self, counted: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.ignored: set[int] = set()
        self._counted = counted
        self._live: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor) and self._counted(value):
                self._add(value.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or key in self.ignored:
            return
        self._live.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.bytes -= size
