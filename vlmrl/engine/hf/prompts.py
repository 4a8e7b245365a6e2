"""Keys and values of prompts, each held once for all rows that begin with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vlmrl.model.cached_attention import KeysValues, SharedPrefixes, additive

_names = itertools.count()


@dataclass
class CachedPrompts:
    """CachedPrompts of one batch or of several, each known by a name that no other has.

    Several caches may hold the same tensors, each in a list ``layers`` of its own: a tensor is freed when the last of them drops it.
    """

    names: list[int]
    layers: list[KeysValues | None]
    """``[prefixes, key heads, columns, width]``, right-aligned; None for a recurrent layer."""
    valid: torch.Tensor
    """``[prefixes, columns]``: which columns hold a token."""

    @classmethod
    def of(cls, layers: list[KeysValues | None], valid: torch.Tensor) -> CachedPrompts:
        """New prefixes."""
        return cls([next(_names) for _ in valid], layers, valid)

    def copy(self) -> CachedPrompts:
        """The same tensors in a list of its own."""
        return CachedPrompts(self.names, list(self.layers), self.valid)

    def indices(self, names: Iterable[int]) -> list[int]:
        """Where these are."""
        places = {name: index for index, name in enumerate(self.names)}
        return [places[name] for name in names]

    @classmethod
    def join(cls, parts: Sequence[CachedPrompts], names: Iterable[int]) -> CachedPrompts:
        """Those of all ``parts`` with these names, without columns that none of them uses. The parts are used up.

        Nothing is copied if one of the parts has just these.
        """
        wanted = set(names)
        exact = next((part for part in parts if wanted == set(part.names)), None)
        return exact or _gathered(parts, wanted)

    def shared_by(self, owners: Sequence[int], dtype: torch.dtype) -> SharedPrefixes:
        """These prefixes as attention takes them: row i begins with prefix ``owners[i]``."""
        rows: list[list[int]] = [[] for _ in self.names]
        for row, owner in enumerate(owners):
            rows[owner].append(row)
        most = max(map(len, rows))
        readers = [row for each in rows for row in each + [0] * (most - len(each))]
        mask = additive(self.valid[:, None], dtype)
        if readers == list(range(len(owners))):
            return SharedPrefixes(self.layers, mask)
        places = [0] * len(owners)
        for owner, each in enumerate(rows):
            for place, row in enumerate(each):
                places[row] = owner * most + place
        indices = (torch.tensor(each, device=self.valid.device) for each in (readers, places))
        return SharedPrefixes(self.layers, mask, *indices)


def _gathered(parts: Sequence[CachedPrompts], wanted: set[int]) -> CachedPrompts:
    """The ``wanted`` prefixes of ``parts``, whose layers are freed one by one as they are copied."""
    pieces: list[tuple[CachedPrompts, list[int]]] = []
    names: list[int] = []
    for part in parts:
        found = [index for index, name in enumerate(part.names) if name in wanted and name not in names]
        if found:
            names += [part.names[index] for index in found]
            pieces.append((part, found))
    length = max(int(part.valid[found].sum(1).max()) for part, found in pieces)
    valid = torch.cat([_resized(part.valid[found][..., None], length)[..., 0] for part, found in pieces])
    layers: list[KeysValues | None] = []
    while pieces[0][0].layers:
        layers.append(_joined([(part.layers.pop(0), found) for part, found in pieces], length))
    return CachedPrompts(names, layers, valid)


def _joined(parts: Sequence[tuple[KeysValues | None, list[int]]], length: int) -> KeysValues | None:
    """One layer's prefixes at each part's indices, ``length`` columns of them."""
    keys, values = ([_resized(layer[kind][found], length) for layer, found in parts if layer] for kind in (0, 1))
    return (torch.cat(keys), torch.cat(values)) if keys else None


def prefix_bytes(held: Iterable[CachedPrompts]) -> int:
    """Memory of all these prefixes. Tensors that several of them hold count once."""
    tensors = (tensor for prefixes in held for layer in prefixes.layers if layer for tensor in layer)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _resized(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The last ``length`` of the second to last dimension, or all after as many zeros as are missing."""
    return left_pad(tensor[..., -length:, :], length)


def left_pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros before the second to last dimension, up to ``length``."""
    return torch.nn.functional.pad(tensor, (0, 0, length - tensor.shape[-2], 0))
