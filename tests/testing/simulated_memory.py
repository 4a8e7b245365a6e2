"""Two dispatch modes over fake tensors: one counts the memory of a simulated GPU, one answers what the code reads back.

Fake tensors have shapes, dtypes and storages, and no values. :class:`Memory` counts their storages as the caching allocator does,
in blocks of 512 bytes. It does not count what a real process has besides: the CUDA context, workspaces of cuBLAS and NCCL, and the
allocator's fragmentation. :class:`KnownNumbers` keeps the values of small tensors that are computed from known ones alone, such as
token ids, masks, positions and image grids, so that their number of entries, their maximum or a list of them can be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
BLOCK = 512  # bytes: the caching allocator rounds each allocation up to a multiple of it
SNAPSHOT_EVERY = 2**26  # bytes by which a peak must rise before its parts are listed again
KNOWN_ELEMENTS = 2**23  # larger tensors, which are computed, have no known values
Parts = Callable[[], dict[str, Iterable[torch.Tensor]]]


class Memory(TorchDispatchMode):
    """The bytes of all storages on the simulated GPU: now, and at the peak of each phase, by part."""

    def __init__(self, parts: Parts, vocabulary: int) -> None:
        super().__init__()
        self.now = 0
        self.phase = "load"
        self.peaks: dict[str, dict[str, int]] = {}
        """By phase: ``total`` and the bytes of each part at that moment."""
        self._parts = parts
        self._vocabulary = vocabulary
        self._live: dict[int, int] = {}
        self._logits: set[int] = set()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self._note()
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._live[key] = size
        self.now += size
        if tensor.dim() == 2 and tensor.shape[1] == self._vocabulary:
            self._logits.add(key)
        self._note()
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)
        self._logits.discard(key)

    def _note(self) -> None:
        peak = self.peaks.setdefault(self.phase, {"total": 0, "listed": -SNAPSHOT_EVERY})
        if self.now <= peak["total"]:
            return
        peak["total"] = self.now
        if self.now - peak["listed"] >= SNAPSHOT_EVERY:
            self.peaks[self.phase] = {"total": self.now, "listed": self.now, **self.by_part()}

    def by_part(self) -> dict[str, int]:
        """The bytes of each part now; ``activations`` is the rest, temporary tensors included."""
        seen: set[int] = set()
        sizes: dict[str, int] = {}
        for name, tensors in self._parts().items():
            keys = {tensor.untyped_storage()._cdata for tensor in tensors} - seen
            seen |= keys
            sizes[name] = sum(self._live.get(key, 0) for key in keys)
        sizes["logits"] = sum(self._live[key] for key in self._logits - seen)
        return sizes | {"activations": self.now - sum(sizes.values())}


class KnownNumbers(TorchDispatchMode):
    """Values of fake tensors, where they follow from real ones: computed a second time, on the CPU.

    Reading an unknown number, such as a loss, gives 1, and an unknown truth value, such as that of a check for infinity, False.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = weakref.WeakKeyDictionary()  # type: ignore[var-annotated]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values on the CPU; ``None`` if they are not known."""
        if isinstance(tensor, FakeTensor):
            return self._values.get(_Identity.of(tensor))
        with _disable_current_modes():
            return tensor.detach().cpu()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = [self.of(tensor) for tensor in tensors]
        values = None
        if all(value is not None for value in known) and _is_small(func, args, kwargs, tensors):
            by_id = dict(zip(map(id, tensors), known, strict=True))
            with _disable_current_modes(), torch.no_grad():
                a, k = tree_unflatten([_on_cpu(by_id.get(id(leaf), leaf)) for leaf in leaves], spec)
                values = func(*a, **k)
        if func is aten._local_scalar_dense.default:
            return _unknown(args[0].dtype) if values is None else values
        if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
            args = (args[0], self._integer(args[1]), *args[2:])
        if func is aten.masked_select.default:
            func, args = aten.index.Tensor, (args[0], self._integer([args[1]]))
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException:
            assert values is not None, f"{func}: the shape of its output follows from values that are not known"
            result = args[0].new_empty(values.shape, dtype=values.dtype)
        if func._schema.is_mutable and values is None:
            for tensor in _written(func, args, kwargs):
                self._values.pop(_Identity.of(tensor), None)
        elif values is not None:
            self._remember(result, values)
        return result

    def _integer(self, indices: Any) -> list[torch.Tensor | None]:
        """Masks among the ``indices`` of ``aten.index`` as integers."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            mask = self.of(index)
            assert mask is not None, "index: how many entries of the mask are set is not known"
            with _disable_current_modes():
                count = int(mask.count_nonzero())
            found += [torch.empty(count, dtype=torch.long, device=index.device) for _ in range(index.dim())]
        return found

    def _remember(self, result: Any, values: Any) -> None:
        for fake, value in zip(tree_flatten(result)[0], tree_flatten(values)[0], strict=True):
            if isinstance(fake, FakeTensor) and isinstance(value, torch.Tensor):
                self._values[_Identity.of(fake)] = value


class _Identity:
    """A key for a tensor in a weak dictionary: tensors compare by element."""

    @staticmethod
    def of(tensor: torch.Tensor) -> _Identity:
        key = getattr(tensor, "_identity", None)
        if key is None:
            key = tensor._identity = _Identity()  # type: ignore[attr-defined]
        return key


def _is_small(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    if not tensors:  # a factory: its first argument is the size
        sizes = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, int)]
        return max(sizes, default=0) <= KNOWN_ELEMENTS and "random" not in str(func)
    if func in (aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default, aten.zeros_like.default):
        return tensors[0].numel() <= KNOWN_ELEMENTS
    return max(tensor.untyped_storage().nbytes() for tensor in tensors) <= 16 * KNOWN_ELEMENTS


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in changed for leaf in tree_flatten(named.get(name))[0] if isinstance(leaf, torch.Tensor)]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _unknown(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


