"""Values of tensors on a simulated GPU, as far as they follow from real ones.

Kernels compute nothing there, so that code which reads a number back, or makes as many rows as a mask has entries, would see zeros.
Within :class:`KnownNumbers`, small tensors that follow from tensors of the host alone are computed a second time, on the CPU: token
ids, masks, positions and image grids. What is read back from them is right. Any other number is 1, and any other truth value False,
so that a check for infinity finds nothing.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
LARGEST = 2**23  # elements of a tensor whose values are kept; larger ones are activations
INDEXING = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_)
UNINITIALIZED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
SHAPED_BY_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten._unique2.default,
)
_tensor = torch.tensor


def _new_tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor``, which would copy its data to the GPU unseen: made on the host, then copied by an operator."""
    made = _tensor(data, *args, **kwargs)
    return made if device is None else made.to(device)


class KnownNumbers(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._values: weakref.WeakKeyDictionary[_Key, torch.Tensor] = weakref.WeakKeyDictionary()

    def __enter__(self) -> KnownNumbers:
        torch.tensor = _new_tensor  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.tensor = _tensor
        super().__exit__(*error)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values on the CPU; ``None`` if they are not known."""
        return self._values.get(_key(tensor)) if tensor.device.type == "cuda" else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not any(_on_gpu(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        values = self._on_cpu(func, leaves, tensors, spec) if _is_small(leaves, tensors) else None
        if func is aten._local_scalar_dense.default:
            return _unknown(args[0].dtype) if values is None else values
        if func in SHAPED_BY_VALUES:
            assert values is not None, f"{func}: the shape of its output follows from values that are not known"
            result = tree_map_only(torch.Tensor, partial(torch.empty_like, device=tensors[0].device), values)
        else:
            if func.overloadpacket in INDEXING:
                args = (args[0], self._integers(args[1]), *args[2:])
            result = func(*args, **kwargs)
        if values is None:
            for tensor in _written(func, args, kwargs):
                self._values.pop(_key(tensor), None)
            return result
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            return values  # a copy from the GPU
        self._remember(result, values)
        return result

    def _on_cpu(self, func: Any, leaves: list[Any], tensors: list[torch.Tensor], spec: Any) -> Any:
        """The operator's result on the CPU, if all of its inputs are known."""
        known = {id(tensor): self.of(tensor) for tensor in tensors}
        if any(value is None for value in known.values()) or func.overloadpacket in UNINITIALIZED:
            return None
        with _disable_current_modes(), torch.no_grad():
            host = tree_map_only(torch.device, lambda _: torch.device("cpu"), [known.get(id(x), x) for x in leaves])
            args, kwargs = tree_unflatten(host, spec)
            return func(*args, **kwargs)

    def _integers(self, indices: Any) -> list[torch.Tensor | None]:
        """The ``indices`` of ``aten.index``, with integers for a mask."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            mask = self.of(index)
            assert mask is not None, "index: how many entries of the mask are set is not known"
            with _disable_current_modes():
                count = int(mask.count_nonzero())
            found += [torch.zeros(count, dtype=torch.long, device=index.device) for _ in range(index.dim())]
        return found

    def _remember(self, result: Any, values: Any) -> None:
        for tensor, value in zip(tree_flatten(result)[0], tree_flatten(values)[0], strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self._values[_key(tensor)] = value


class _Key:
    """Stands for a tensor in a dictionary, since tensors compare by element."""


def _key(tensor: torch.Tensor) -> _Key:
    key = getattr(tensor, "_known_numbers_key", None)
    if key is None:
        key = tensor._known_numbers_key = _Key()  # type: ignore[attr-defined]
    return key


def _on_gpu(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "cuda"


def _is_small(leaves: list[Any], tensors: list[torch.Tensor]) -> bool:
    if tensors:
        return max(tensor.untyped_storage().nbytes() for tensor in tensors) <= 8 * LARGEST
    return max((leaf for leaf in leaves if isinstance(leaf, int)), default=0) <= LARGEST  # the size of a new tensor


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in changed for leaf in tree_flatten(named.get(name))[0] if isinstance(leaf, torch.Tensor)]


def _unknown(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
