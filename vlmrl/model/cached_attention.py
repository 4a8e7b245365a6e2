"""Attention of new tokens to a KV cache whose rows may share a prefix: a group's prompt is held and read once for all its members.

A token attends to its row's own columns and to its row's prefix. The two results are joined by their log-sum-exp, which is exact:
softmax over both, as in Hydragen (arXiv 2402.05099, section 3.1). Queries with the same keys, from several heads and rows, are the
rows of one matrix. Only a prefill repeats keys, those of the rows' own columns: else it would repeat its mask, which is larger.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""Each ``[rows, key heads, columns, width]``."""

CACHE_NAMES = ("cache", "past_key_values")
"""The argument of transformers' models and layers that is a KV cache: from version 5.24 on, and before."""

ALIGNED = 16  # columns: the GPU's kernel reads a mask in blocks of so many
_cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_gpu_kernel = torch.ops.aten._scaled_dot_product_efficient_attention


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes, and the rows that read them.

    Rows 0 and 2 read the first of two prefixes and row 1 the second: ``readers`` is ``[0, 2, 1, 0]``, filled up with any row, and
    ``places`` is ``[0, 2, 1]``, each row's place in ``readers``. Both are None where they would be 0, 1, 2, ...
    """

    layers: Sequence[KeysValues | None]
    """``[prefixes, key heads, columns, width]`` by layer; None for a recurrent layer."""
    mask: torch.Tensor
    """``[prefixes, 1, 1, columns]``, added to the scores: 0 or -inf."""
    readers: torch.Tensor | None = None
    """``[prefixes * the most rows of one]``."""
    places: torch.Tensor | None = None
    """``[rows]``."""


@dataclass(frozen=True)
class CachedAttention:
    """What the tokens of one forward attend to, for all layers."""

    mask: torch.Tensor
    """``[rows, 1, new, columns]``, as :func:`additive` makes it, for each row's own columns."""
    prefixes: SharedPrefixes | None = None


def cache_name(model: nn.Module) -> str:
    """The one that ``model`` has. Raises ValueError if it has none."""
    found = [name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters]
    if not found:
        raise ValueError(
            f"{type(model).__name__}.forward must take a KV cache as one of {CACHE_NAMES}, but it takes none."
        )
    return found[0]


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask for ``allowed`` ``[rows, new, columns]``, for all heads and with aligned strides: ``[rows, 1, new, columns]``."""
    rows, new, columns = allowed.shape
    mask = torch.zeros(rows, 1, new, columns + -columns % ALIGNED, dtype=dtype, device=allowed.device)
    return mask[..., :columns].masked_fill_(~allowed[:, None], -torch.inf)


def attend_cached(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: CachedAttention, scale: float | None
) -> torch.Tensor:
    """``query`` ``[rows, heads, new, width]`` over the rows' own keys and values and their prefixes: ``[rows, new, heads, width]``."""
    rows, heads, new, width = query.shape
    shared_by = heads // key.shape[1]
    packed = query.reshape(rows, key.shape[1], shared_by * new, width)
    if new == 1:
        out, lse = _partial(packed, key, value, plan.mask, scale)
    else:
        keys, values = (each.repeat_interleave(shared_by, dim=1) for each in (key, value))
        by_head = _partial(query, keys, values, plan.mask, scale)
        out, lse = (each.reshape(packed.shape[: each.dim()]) for each in by_head)
    if plan.prefixes is not None:
        more, more_lse = _over_prefixes(layer, packed, plan.prefixes, scale)
        share = (more_lse - lse).sigmoid_().to(out.dtype)
        out = out.lerp(more, share[..., None])
    return out.unflatten(2, (shared_by, new)).permute(0, 3, 1, 2, 4).reshape(rows, new, heads, width)


def _over_prefixes(
    layer: int, packed: torch.Tensor, prefixes: SharedPrefixes, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's ``packed`` queries over its prefix: ``[rows, key heads, queries, width]`` and the log-sum-exp without ``width``."""
    found = prefixes.layers[layer]
    assert found is not None
    gathered = packed if prefixes.readers is None else packed.index_select(0, prefixes.readers)
    count, (_, key_heads, queries, width) = len(found[0]), gathered.shape
    by_prefix = gathered.view(count, -1, key_heads, queries, width).transpose(1, 2).flatten(2, 3)
    out, lse = _partial(by_prefix, *found, prefixes.mask, scale)
    out, lse = (
        every.unflatten(2, (-1, queries)).transpose(1, 2).reshape(len(gathered), key_heads, queries, *rest)
        for every, rest in ((out, [width]), (lse, []))
    )
    if prefixes.places is None:
        return out, lse
    return out.index_select(0, prefixes.places), lse.index_select(0, prefixes.places)


def _partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[rows, heads, queries, width]`` and its float32 log-sum-exp ``[rows, heads, queries]``.

    These are the kernels behind sdpa, called directly because sdpa does not return the log-sum-exp. On a GPU it is the
    memory-efficient one: the flash kernel takes no mask.
    """
    if query.device.type == "cpu":
        out, lse = _cpu_kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return out, lse
    queries = query.shape[2]
    mask = mask.expand(len(query), query.shape[1], queries, key.shape[2])
    out, lse, *_ = _gpu_kernel(query, key, value, mask, True, scale=scale)
    return out, lse[..., :queries]  # padded to blocks of 32
