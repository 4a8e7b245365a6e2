"""Values of tensors on a simulated GPU, as far as they follow from real ones.

Kernels compute nothing there, so that code which reads a number back, or makes as many rows as a mask has entries, would see zeros.
Within :class:`KnownNumbers`, small tensors that follow from tensors of the host alone are computed a second time, on the CPU: token
ids, masks, positions and image grids. What is read back from them is right. Any other number is 1, and any other truth value False,
so that a check for infinity finds nothing.
"""

from __future__ import annotations

import weakref
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

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
        leaves = _leaves((*args, *kwargs.values()))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not any(_on_gpu(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        values = self._on_cpu(func, tensors, args, kwargs) if _is_small(leaves, tensors) else None
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

    def _on_cpu(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The operator's result on the CPU, if all of its inputs are known."""
        if func.overloadpacket in UNINITIALIZED or any(self.of(tensor) is None for tensor in tensors):
            return None
        with _disable_current_modes(), torch.no_grad():
            return func(*(self._host(each) for each in args), **{k: self._host(v) for k, v in kwargs.items()})

    def _host(self, argument: Any) -> Any:
        """An operator's argument for the CPU."""
        if isinstance(argument, list | tuple):
            return [self._host(each) for each in argument]
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return self.of(argument) if isinstance(argument, torch.Tensor) else argument

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


def _leaves(arguments: Any) -> list[Any]:
    """An operator's arguments and the entries of those that are lists; `tree_flatten` takes most of a simulated step's time."""
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, list | tuple):
            found += each
        else:
            found.append(each)
    return found


def _on_gpu(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "cuda"


def _is_small(leaves: list[Any], tensors: list[torch.Tensor]) -> bool:
    if tensors:
        return max(tensor.untyped_storage().nbytes() for tensor in tensors) <= 8 * LARGEST
    return max((leaf for leaf in leaves if isinstance(leaf, int)), default=0) <= LARGEST  # the size of a new tensor


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_arguments(func)]
    return [leaf for leaf in _leaves(changed) if isinstance(leaf, torch.Tensor)]


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """The places and names of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _unknown(dtype: torch.dtype) -> Any:
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
