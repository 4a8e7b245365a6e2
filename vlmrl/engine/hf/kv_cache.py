"""The embedded engine's KV cache: a batch to which rows are added and from which they are removed.

Attention layers hold keys and values in buffers with spare columns. Rows have different lengths and are right-aligned; ``valid``
marks the columns that hold a token. Recurrent layers hold one state for each row. The model gets an ordinary Hugging Face cache.

A prompt is prefilled once for all rows that start from it, and its keys and values stay a prefix that they share, in this batch and
in their next turns. A row's own columns begin after it. Only these are copied when rows join or leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from vlmrl.engine.hf.prompts import CachedPrompts, left_pad, prefix_bytes
from vlmrl.model.cached_attention import CachedAttention, KeysValues, SharedPrefixes, additive

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
            torch.cat([left_pad(getattr(layer, name), length) for layer in layers]) for name in ("keys", "values")
        )
        return cls(keys, values)

    def select(self, rows: torch.Tensor, columns: torch.Tensor | int) -> GrowingLayer:
        """``rows``, each with its own ``columns`` ``[rows, length]``, or all with the last so many."""
        chosen = (tensor.index_select(0, rows) for tensor in self._last(columns))
        if isinstance(columns, torch.Tensor):
            index = columns[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
            chosen = (tensor.gather(2, index) for tensor in chosen)
        return GrowingLayer(*chosen)

    def _last(self, columns: torch.Tensor | int) -> KeysValues:
        first = 0 if isinstance(columns, torch.Tensor) else self.keys.shape[2] - columns
        return self.keys[:, :, first:], self.values[:, :, first:]


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

    def select(self, rows: torch.Tensor, columns: torch.Tensor | int = 0) -> StateLayer:
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


@dataclass(eq=False)
class BatchCache:
    """The ``layers`` of a batch of rows, with ``valid`` ``[rows, columns]``. RequestRow i begins with prefix ``owners[i]``, if any."""

    layers: list[Layer]
    valid: torch.Tensor
    prefixes: CachedPrompts | None = None
    owners: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hf = Cache(layers=list(self.layers))
        self._shared: SharedPrefixes | None = None

    @classmethod
    def empty(cls, kinds: Sequence[str], rows: int, device: torch.device) -> BatchCache:
        """A cache without columns, for a model with these kinds of layers."""
        return cls([LAYERS[kind]() for kind in kinds], torch.zeros(rows, 0, dtype=torch.bool, device=device))

    @classmethod
    def join(cls, parts: Sequence[BatchCache]) -> BatchCache:
        """The rows of all parts, concatenated. The parts are used up: each layer's memory is freed when it is joined."""
        prefixes, owners = _joined_prefixes(parts)
        if len(parts) == 1:
            return cls(parts[0].layers, parts[0].valid, prefixes, owners)
        length = max(part.columns for part in parts)
        valid = torch.cat([left_pad(part.valid[:, :, None], length)[..., 0] for part in parts])
        layers = []
        while parts[0].layers:
            first = [part._pop() for part in parts]
            layers.append(first[0].join(first, length))
        return cls(layers, valid, prefixes, owners)

    @property
    def nbytes(self) -> int:
        """Memory of all layers and prefixes, spare columns included."""
        return nbytes([self])

    @property
    def columns(self) -> int:
        """Of the rows' own tokens."""
        return self.valid.shape[1]

    @property
    def prefix_columns(self) -> int:
        return 0 if self.prefixes is None else self.prefixes.valid.shape[1]

    def mask_for(self, real: torch.Tensor) -> torch.Tensor:
        """``[rows, new, columns + new]``, before :meth:`extend`: a new token attends to its row's past and new tokens up to itself.

        ``real`` ``[rows, new]`` is False for padding, which attends to itself, since a query without any key gives NaN.
        """
        rows, length = real.shape
        if length == 1:
            return torch.cat([self.valid, torch.ones_like(real)], dim=1)[:, None]
        causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=real.device)
        new = (causal & real[:, None, :]) | itself
        return torch.cat([self.valid[:, None, :].expand(rows, length, -1), new], dim=2)

    def attention(self, real: torch.Tensor, dtype: torch.dtype) -> CachedAttention | None:
        """What new tokens attend to, before :meth:`extend`; ``real`` as in :meth:`mask_for`. None: all before them, in plain rows."""
        if not self.columns and self.prefixes is None and bool(real.all()):
            return None
        if self._shared is None and self.prefixes is not None:
            self._shared = self.prefixes.shared_by(self.owners, dtype)
        return CachedAttention(additive(self.mask_for(real), dtype), self._shared)

    def extend(self, valid: torch.Tensor) -> None:
        """Add the columns of the next forward: ``valid`` ``[rows, added]`` is True where one holds a token."""
        self.valid = torch.cat([self.valid, valid], dim=1)

    def expect(self, columns: int) -> None:
        """The rows need ``columns`` more columns until they end."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.most_columns = self.columns + columns

    def share(self, owners: Sequence[int]) -> BatchCache:
        """Rows that begin with these rows of this cache, whose tokens become prefixes. This cache is used up."""
        prefixes = CachedPrompts.of(
            [(layer.keys, layer.values) if isinstance(layer, GrowingLayer) else None for layer in self.layers],
            self.valid,
        )
        rows = torch.tensor(owners, device=self.valid.device)
        layers = [layer.select(rows, 0) for layer in self.layers]
        return BatchCache(layers, self.valid.new_zeros(len(owners), 0), prefixes, list(owners))

    def select(self, rows: Sequence[int], consume: bool = False) -> BatchCache:
        """Only ``rows`` (an index may repeat), without holes and without columns that none of them uses.

        ``consume``: this cache is not needed any more. Each layer's memory is freed when its rows are copied, and prefixes
        that none of the rows begins with are dropped.
        """
        index = torch.tensor(rows, device=self.valid.device)
        valid = self.valid[index]
        length = int(valid.sum(1).max()) if len(rows) else 0
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)[:, valid.shape[1] - length :]
        has_holes = bool((order.diff(dim=1) != 1).any())
        prefixes, owners = self._prefixes_of(rows, consume)
        layers: list[Layer] = []
        for number in range(len(self.layers)):
            layer = self._pop() if consume else self.layers[number]
            layers.append(layer.select(index, order if has_holes else length))
            del layer
        return BatchCache(layers, valid.gather(1, order), prefixes, owners)

    def taken(self, rows: Sequence[int], consume: bool = False) -> BatchCache:
        """``rows`` in this order. If they are all rows of this cache, and it is compact enough, this cache itself; else a copy.

        ``consume``: as in :meth:`select`.
        """
        if list(rows) == list(range(len(self.valid))) and self.columns <= SLACK * int(self.valid.sum(1).max()):
            return self
        return self.select(rows, consume)

    def copied(self, rows: Sequence[int], known: Iterable[CachedPrompts]) -> BatchCache:
        """A copy of ``rows`` that holds no prompt of other rows. ``known`` prompts are shared if they are just those of ``rows``."""
        copy = self.select(rows)
        copy.prefixes, copy.owners = _joined_prefixes([copy], known)
        return copy

    def _prefixes_of(self, rows: Sequence[int], compact: bool) -> tuple[CachedPrompts | None, list[int]]:
        """The prefixes of ``rows``, or all prefixes unless ``compact``, and each row's index among them."""
        if self.prefixes is None:
            return None, []
        names = [self.prefixes.names[self.owners[row]] for row in rows]
        prefixes = CachedPrompts.join([self.prefixes], names) if compact else self.prefixes.copy()
        return prefixes, prefixes.indices(names)

    def _pop(self) -> Layer:
        """Remove and return the first layer, which Hugging Face's cache holds too."""
        self.hf.layers.pop(0)
        return self.layers.pop(0)


def _joined_prefixes(
    parts: Sequence[BatchCache], known: Iterable[CachedPrompts] = ()
) -> tuple[CachedPrompts | None, list[int]]:
    """The prefixes that rows of ``parts`` begin with, and the index of each row's. Those of the parts are used up.

    CachedPrompts that are ``known`` are taken from there, and stay.
    """
    names, held = [], []
    for part in parts:
        if part.prefixes is not None:
            names += [part.prefixes.names[owner] for owner in part.owners]
            held.append(part.prefixes)
            part.prefixes = None
    if not held:
        return None, []
    prefixes = CachedPrompts.join([*(each.copy() for each in known), *held], names)
    return prefixes, prefixes.indices(names)


def nbytes(caches: Iterable[BatchCache]) -> int:
    """Memory of all these caches. CachedPrompts that several of them hold count once."""
    distinct = {id(cache): cache for cache in caches}.values()
    shared = prefix_bytes(cache.prefixes for cache in distinct if cache.prefixes is not None)
    return shared + sum(layer.nbytes for cache in distinct for layer in cache.layers)
