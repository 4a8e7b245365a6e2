"""The embedded engine's KV cache: a batch to which rows are added and from which they are removed.

Attention layers hold keys and values in buffers with spare columns. Rows have different lengths and are right-aligned; ``valid``
marks the columns that hold a token. Recurrent layers hold one state for each row. The model gets an ordinary Hugging Face cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

SLACK = 1.25  # a cache with more columns than this times its longest row's tokens is compacted before it is reused


class GrowingLayer(DynamicLayer):
    """A cache layer that writes new tokens into spare columns instead of copying all keys and values at each token."""

    keys: torch.Tensor
    values: torch.Tensor
    most_columns: int | None = None
    """Columns that its rows need until they end: more are not allocated. None: not known."""

    def __init__(self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None) -> None:
        super().__init__()
        if keys is not None and values is not None:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        length, added = self.keys.shape[2], key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < length + added:
            self._buffers = tuple(
                _grown(old, new, length + added, self.most_columns)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )  # type: ignore[assignment]
        keys, values = self._buffers  # type: ignore[misc]
        keys[:, :, length : length + added] = key_states
        values[:, :, length : length + added] = value_states
        self.keys, self.values = keys[:, :, : length + added], values[:, :, : length + added]
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values, spare columns included."""
        held = self._buffers or ((self.keys, self.values) if self.is_initialized else ())
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    @classmethod
    def join(cls, layers: Sequence[Any], length: int) -> GrowingLayer:
        """The rows of all ``layers``, padded on the left to ``length`` columns."""
        keys, values = (
            torch.cat([_left_pad(getattr(layer, name), length) for layer in layers]) for name in ("keys", "values")
        )
        return cls(keys, values)

    def select(self, rows: torch.Tensor, columns: torch.Tensor) -> GrowingLayer:
        """``rows``, each with its own ``columns`` ``[rows, length]``."""
        index = columns[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
        return GrowingLayer(self.keys[rows].gather(2, index), self.values[rows].gather(2, index))


class StateLayer(LinearAttentionLayer):
    """Each row's state in a recurrent layer: the last inputs of its convolution, and the recurrent state."""

    def __init__(self, convolution: torch.Tensor | None = None, state: torch.Tensor | None = None) -> None:
        super().__init__()
        if convolution is not None and state is not None:
            self.lazy_initialization(convolution, state)
            self.conv_states[0], self.recurrent_states[0] = convolution, state
            self.has_previous_state[0] = True

    @property
    def nbytes(self) -> int:
        """Memory of the states."""
        states = (self.conv_states[0], self.recurrent_states[0]) if self.has_previous_state[0] else ()
        return sum(state.nbytes for state in states if state is not None)

    @classmethod
    def join(cls, layers: Sequence[Any], length: int) -> StateLayer:
        """The rows of all ``layers``."""
        return cls(
            torch.cat([layer.conv_states[0] for layer in layers]),
            torch.cat([layer.recurrent_states[0] for layer in layers]),
        )

    def select(self, rows: torch.Tensor, columns: torch.Tensor) -> StateLayer:
        """``rows``; a state has no columns."""
        convolution, state = self.conv_states[0], self.recurrent_states[0]
        assert convolution is not None and state is not None
        return StateLayer(convolution[rows], state[rows])


Layer = GrowingLayer | StateLayer
LAYERS: dict[str, type[GrowingLayer] | type[StateLayer]] = {
    "full_attention": GrowingLayer,
    "linear_attention": StateLayer,
}
"""By the names of ``layer_types`` in Hugging Face's configs."""


def _grown(old: torch.Tensor, new: torch.Tensor, needed: int, most: int | None) -> torch.Tensor:
    rows, heads, _, size = new.shape
    columns = needed + max(64, needed // 2)
    if most is not None:
        columns = max(needed, min(columns, most))
    room = new.new_empty(rows, heads, columns, size)
    room[:, :, : old.shape[2]] = old
    return room


class BatchCache:
    """The ``layers`` of a batch of rows, with ``valid`` ``[rows, columns]``."""

    def __init__(self, layers: list[Layer], valid: torch.Tensor) -> None:
        self.valid = valid
        self.layers = layers
        self.hf = Cache(layers=list(layers))

    @classmethod
    def empty(cls, kinds: Sequence[str], rows: int, device: torch.device) -> BatchCache:
        """A cache without columns, for a model with these kinds of layers."""
        return cls([LAYERS[kind]() for kind in kinds], torch.zeros(rows, 0, dtype=torch.bool, device=device))

    @classmethod
    def join(cls, parts: Sequence[BatchCache]) -> BatchCache:
        """The rows of all parts, concatenated. The parts are used up: each layer's memory is freed when it is joined."""
        if len(parts) == 1:
            return parts[0]
        length = max(part.columns for part in parts)
        valid = torch.cat([_left_pad(part.valid[:, :, None], length)[..., 0] for part in parts])
        layers = []
        while parts[0].layers:
            first = [part._pop() for part in parts]
            layers.append(first[0].join(first, length))
        return cls(layers, valid)

    @property
    def nbytes(self) -> int:
        """Memory of all layers, spare columns included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def columns(self) -> int:
        return self.valid.shape[1]

    def mask_for(self, real: torch.Tensor) -> torch.Tensor:
        """``[rows, 1, new, columns + new]``, before :meth:`extend`: a new token attends to its row's past and new tokens up to itself.

        ``real`` ``[rows, new]`` is False for padding, which attends to itself, since a query without any key gives NaN.
        """
        rows, length = real.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=real.device)
        new = (causal & real[:, None, :]) | itself
        return torch.cat([self.valid[:, None, :].expand(rows, length, -1), new], dim=2)[:, None]

    def extend(self, valid: torch.Tensor) -> None:
        """Add the columns of the next forward: ``valid`` ``[rows, added]`` is True where one holds a token."""
        self.valid = torch.cat([self.valid, valid], dim=1)

    def expect(self, columns: int) -> None:
        """The rows need ``columns`` more columns until they end."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.most_columns = self.columns + columns

    def select(self, rows: torch.Tensor, use_up: bool = False) -> BatchCache:
        """Only ``rows`` (an index may repeat), without holes and without columns that none of them uses.

        ``use_up``: this cache is not needed any more, so that each layer's memory is freed when its rows are copied.
        """
        valid = self.valid[rows]
        length = int(valid.sum(1).max()) if len(rows) else 0
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)[:, valid.shape[1] - length :]
        layers: list[Layer] = []
        for index in range(len(self.layers)):
            layer = self._pop() if use_up else self.layers[index]
            layers.append(layer.select(rows, order))
            del layer
        return BatchCache(layers, valid.gather(1, order))

    def taken(self, rows: Sequence[int], use_up: bool = False) -> BatchCache:
        """``rows`` in this order. If they are all rows of this cache, and it is compact enough, this cache itself; else a copy.

        ``use_up``: as in :meth:`select`.
        """
        if list(rows) == list(range(len(self.valid))) and self.columns <= SLACK * int(self.valid.sum(1).max()):
            return self
        return self.select(torch.tensor(rows, device=self.valid.device), use_up)

    def _pop(self) -> Layer:
        """Remove and return the first layer, which Hugging Face's cache holds too."""
        self.hf.layers.pop(0)
        return self.layers.pop(0)


def _left_pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros before the second to last dimension, up to ``length``."""
    return torch.nn.functional.pad(tensor, (0, 0, length - tensor.shape[-2], 0))
