"""Attention over rows with common prefixes, laid out as a tree (`train/prefix_tree.py`): a token attends to its ancestors and itself.

It is registered with transformers as ``vlmrl_tree``, for the text layers. Scores between unrelated tokens are not computed and no
dense mask is built: a CPU goes span by span, a GPU by flex attention's blocks. The engine passes what its tokens attend to in its KV
cache instead (`cached_attention.py`). With neither it is plain sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmrl.model.cached_attention import CachedAttention, attend_cached
from vlmrl.utils.folders import check_compiled_code

NAME = "vlmrl_tree"
BLOCK = 128  # side of flex attention's blocks, in tokens
GRAPHS = 64  # the limit of compiled versions: a process may hold several models

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def install(model: Any) -> None:
    """Make the model's text layers use this attention; the vision tower keeps its own."""
    text = model.config.get_text_config()
    model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})


@dataclass(frozen=True)
class Span:
    """Tokens ``first`` to ``last``, without a branch between them; their descendants follow, up to ``end``.

    The layout of [1 2 3 4] and [1 2 5] has ``Span(0, 2, 5)``, ``Span(2, 4, 4)`` and ``Span(4, 5, 5)``.
    """

    first: int
    last: int
    end: int
    is_root: bool


@dataclass(eq=False)
class SpanPlan:
    """The tree for a CPU. Not the list itself: compiled layers would be compiled for its length."""

    tree: Sequence[Span]


Plan = SpanPlan | BlockMask


def plan(ends: torch.Tensor) -> Plan:
    """The tree for all attention layers. ``ends`` ``[tokens]``: where each token's subtree ends."""
    return SpanPlan(spans(ends.numpy())) if ends.device.type == "cpu" else block_mask(ends)


def spans(ends: np.ndarray) -> list[Span]:
    """The layout's spans in order. All tokens of a span have the same end."""
    firsts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist()]
    found: list[Span] = []
    tree_end = 0
    for first, last in zip(firsts, [*firsts[1:], len(ends)], strict=True):
        is_root = first >= tree_end
        tree_end = max(tree_end, int(ends[first]))
        found.append(Span(first, last, int(ends[first]), is_root))
    return found


def block_mask(ends: torch.Tensor) -> BlockMask:
    """Flex attention's blocks of keys for each block of queries, from the smallest and the largest end in each block."""
    size = len(ends)
    starts = torch.arange(0, size, BLOCK, device=ends.device)
    by_block = torch.nn.functional.pad(ends, (0, -size % BLOCK)).view(-1, BLOCK)
    largest, least = by_block.amax(1), by_block.amin(1)
    before = starts[None, :] < starts[:, None]
    whole = before & (least[None, :] >= starts[:, None] + BLOCK)
    partly = (before & (largest[None, :] > starts[:, None])) & ~whole
    partly |= torch.eye(len(starts), dtype=torch.bool, device=ends.device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends[key])

    listed = (*_listed(partly), *_listed(whole))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of ``blocks`` the number of set entries, and all indices with the set ones first: flex attention's format."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1).int()[None, None], order[None, None]


# Compiled layers call it between their graphs: it has graphs of its own, or loops over the tree.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tree: Plan | None = None,
    cached: CachedAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function: ``[rows, heads, tokens, width]`` in, ``[rows, tokens, heads, width]`` out, as transformers has it."""
    if cached is not None:
        return attend_cached(module.layer_idx, query, key, value, cached, scaling), None  # type: ignore[arg-type]
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if isinstance(tree, BlockMask):
        return _flex(query, key, value, tree, scaling).transpose(1, 2).contiguous(), None
    attended: Any = _SpanAttention.apply(query, key, value, tree.tree, scaling)
    return attended.transpose(1, 2), None


AttentionInterface.register(NAME, attend)


def prepare_compiler() -> None:
    """Raise torch's limit of 8 compiled versions of a function, beyond which it runs uncompiled.

    Raises ValueError if torch would run compiled code of another user.
    """
    check_compiled_code()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)


@cache
def _compiled_flex() -> Any:
    """Flex attention for all lengths: 4 graphs a model, with and without gradient, for one block of tokens and for more.

    transformers' own wrapper is made again at each change between training and evaluation. At torch's limit of 8 graphs, flex
    attention would go on uncompiled and compute all scores; with ``fullgraph`` that is an error.
    """
    prepare_compiler()
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: BlockMask, scale: float | None
) -> torch.Tensor:
    """Flex attention over ``blocks``, ``[rows, heads, tokens, width]`` in and out.

    ``BACKEND``: for fewer than 128 queries, inductor would choose its kernel for decoding, which crashes with blocks of 128 x 128.
    """
    heads = query.shape[1]
    shares_keys = heads & (heads - 1) == 0  # flex attention's own sharing needs a power of two
    if not shares_keys:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    options = {"block_mask": blocks, "scale": scale, "enable_gqa": shares_keys, "kernel_options": {"BACKEND": "TRITON"}}
    result: torch.Tensor = _compiled_flex()(query, key, value, **options)
    return result


def _pieces(tree: Sequence[Span]) -> Iterator[tuple[slice, slice, bool, bool]]:
    """Queries, their keys, whether attention is causal within the piece, and whether it is the queries' first piece.

    A span's descendants are one interval of tokens, and attend to all of the span.
    """
    for span in tree:
        own, below = slice(span.first, span.last), slice(span.last, span.end)
        yield own, own, True, span.is_root
        if span.end > span.last:
            yield below, own, False, span.is_root


class _SpanAttention(torch.autograd.Function):
    """Attention piece by piece, each softmax rescaled by its share of the whole: exact, as flash attention over blocks is.

    Source: FlashAttention-2, arXiv 2307.08691, section 2.3. The pieces are computed by the kernel behind sdpa on CPUs, called
    directly because sdpa does not return the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Sequence[Span], scale: float | None
    ) -> torch.Tensor:
        rows, heads, tokens, width = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(rows, tokens, heads, width, dtype=exact).transpose(1, 2)
        lse = query.new_empty(rows, tokens, heads, dtype=exact).transpose(1, 2)
        for queries, keys, causal, is_first in _pieces(tree):
            operands = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
            more, more_lse = _attend(*operands, 0.0, causal, scale=scale)
            if not is_first:
                known, known_lse = out[:, :, queries], lse[:, :, queries]
                both = torch.logaddexp(known_lse, more_lse)
                more = more * (more_lse - both).exp()[..., None] + known * (known_lse - both).exp()[..., None]
                more_lse = both
            out[:, :, queries], lse[:, :, queries] = more, more_lse
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        # A query has a piece for each span above it: added in bfloat16, its gradient's error would grow with the tree's depth.
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        for queries, keys, causal, _ in _pieces(ctx.tree):
            operands = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
            known = (out[:, :, queries], lse[:, :, queries])
            more = _attend_backward(grad[:, :, queries], *operands, *known, 0.0, causal, scale=ctx.scale)
            for whole, part, places in zip(grads, more, (queries, keys, keys), strict=True):
                whole[:, :, places] += part
        return *(whole.to(query.dtype) for whole in grads), None, None
